"""Arguments of public functions and classes, checked before anything is computed.

array_errors    what messages call an array, and the error for what is none
declarations    what they may be, declared where they are annotated: `@checked`
readable_checks checks of single ones that torch's compiler may read
spelling        what a mistyped word may have been meant as
"""
