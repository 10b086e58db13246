"""A copy of the packages with what docs/adding-an-algorithm.md adds to them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

import relax

ROOT = Path(relax.__file__).parent.parent
PAGE = ROOT / "docs" / "adding-an-algorithm.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """The page's code of that language, in order."""
    return [code for found, code in FENCED.findall(PAGE.read_text(encoding="utf-8")) if found == language]


@attrs.frozen
class Copy:
    """Where it is."""

    root: Path

    @classmethod
    def made(cls, root: Path) -> "Copy":
        """Do what the page says: write the file, add the lines."""
        for package in ("relax", "relax_core"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        (file,) = blocks("python")
        path, _, code = file.removeprefix("# ").partition("\n")
        (root / path).write_text(code, encoding="utf-8")
        registry = root / "relax_core" / "registry.py"
        text = registry.read_text(encoding="utf-8")
        for patch in blocks("diff"):
            before, after = (line[1:] for line in patch.splitlines())
            assert text.count(before + "\n") == 1, f"the registry has no single line {before!r}"
            text = text.replace(before + "\n", f"{before}\n{after}\n")
        registry.write_text(text, encoding="utf-8")
        return cls(root)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python where the copy is what gets imported."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )

    def relax(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        return self.python("-m", "relax.cli", *words)
