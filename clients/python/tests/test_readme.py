"""The examples of the README, as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict


def test_examples_of_the_readme_run() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 5
    names: Dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
