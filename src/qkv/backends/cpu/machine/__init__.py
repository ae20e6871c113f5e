"""The machine that code is compiled for: instruction sets, tile shapes, permissions, fork locks."""
