"""One call, from a public function to a backend and back.

    options         the keyword arguments that all public functions share
    flatten         a variant, an option or an operand as a tree without arrays, and its arrays
    bound           `bind`: a call as `BoundCall(structure, leaves)`
    checked         `check_call`: a bound call as a problem, with the backend that will run it
    cache           prepared calls, by structure and by the layout of the leaves
    attend          run a bound call, prepared or checked; `inspected` does so for `inspect`
    dispatch        whether a call runs in main memory or on a device
    device_call     calls whose tensors stay where they are, as those on CUDA
    vjp, pull_back  gradients, prepared or checked; `gradients` are what they give
    jvp             tangents, and second derivatives
    cotangents, variant_arrays
                    cotangents, tangents and the form of gradients; the arrays of variants
    unknown_keywords
                    the error for a keyword of another library

`attention`, `inspect`, `plan`, `explain`, `vjp`, `jvp` and the bridges to other libraries all begin
with `bind`.
"""
