"""One call, from a public function to a backend and back.

    binding         `bind`: a call as a structure without arrays, and the arrays
    checked         `check_call`: a bound call as a problem, with the backend that will run it
    repeated        calls that are like an earlier one: prepared, and not checked again
    attend          run a bound call, prepared or checked; `inspected` does so for `inspect`
    dispatch        whether a call runs in main memory or on a device
    device_call     calls whose tensors stay where they are, as those on CUDA
    derivatives     gradients, tangents and second derivatives
    merging         `merge` of results of any library

`attention`, `inspect`, `plan`, `explain`, `vjp`, `jvp` and the bridges to other libraries all begin
with `bind`.
"""
