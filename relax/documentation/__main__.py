"""`python -m relax.documentation`: write the generated pages into `docs/`, or into the directory named."""

import sys
from pathlib import Path

from relax.documentation.pages import write

if __name__ == "__main__":
    into = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for path in write(into):
        print(path)
