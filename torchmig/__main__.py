"""``python -m torchmig``: the torchmig program where its script is not on PATH."""

import sys

from torchmig.commands._main import main

if __name__ == "__main__":
    sys.exit(main())
