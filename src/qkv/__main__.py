"""`python -m qkv`: the command line."""

import sys

from qkv_command import main

if __name__ == "__main__":
    sys.exit(main())
