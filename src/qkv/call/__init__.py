"""One call, from a public function to a backend and back.

    options         the keyword arguments that all public functions share
    flatten         a variant, an option or an operand as a tree without arrays, and its arrays
    structure_text, numbered
                    that tree as JSON, for compilers; the objects that it names by number
    bound           `bind`: a call as `BoundCall(structure, leaves)`
    checked         `check_call`: a bound call as a problem, with the backend that will run it
    forms           what calls of one structure share to be alike
    cache           prepared calls: an entry for each structure, and in it by form
    preparing       ask a backend to prepare, when a form was seen before
    numpy_port      what a prepared call is told of NumPy's arrays, and new arrays of results
    attend          run a bound call, prepared or checked; `inspected` does so for `inspect`
    decoding        calls that are alike whatever their number of keys
    stored_steps    the same where keys lie in pages, as int8, or both
    dispatch        whether a call runs in main memory or on a device
    device_call     calls whose tensors stay where they are, as those on CUDA
    derivatives     gradients, tangents and second derivatives
    variant_arrays  the arrays of variants
    merging         `merge` of results of any library
    unknown_keywords
                    the error for a keyword of another library

`attention`, `inspect`, `plan`, `explain`, `vjp`, `jvp` and the bridges to other libraries all begin
with `bind`.
"""
