"""A cache in pages that sequences share until one of them writes.

paged           the cache
page_pool       its arrays, which forks of a cache share
allocator       which pages are free, and how many hold each of the others
"""
