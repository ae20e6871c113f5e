"""The backends that take NumPy arrays, for tests that hold each of them to the same numbers."""

from qkv.backends import DeviceBackend, backends

HOST_BACKENDS = [backend.name for backend in backends() if not isinstance(backend, DeviceBackend)]
