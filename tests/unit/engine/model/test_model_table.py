"""docs/models.md against the installed transformers: served means the tokens of `generate`, and the
rest is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from model_sweep import MODEL_TYPES, verdict
from model_table import PAGE, page, table

VERSION, ROWS = table(PAGE.read_text())
FEW = (  # of each way to be served or refused
    *("gpt2", "gpt_bigcode", "nemotron", "gemma3n_text", "longcat_flash", "bert", "got_ocr2"),
    *(
        "roberta",
        "moshi",
        "diffllama",
        "lfm2",
        "gemma4_unified",
        "falcon",
        "mamba",
        "blt",
        "musicgen",
    ),
)

# With another version of transformers than the page's, only what holds for all versions is checked.
SAME_VERSION = transformers.__version__ == VERSION


@pytest.mark.skipif(not SAME_VERSION, reason=f"the page was made with transformers {VERSION}")
def test_every_class_of_transformers_has_its_row() -> None:
    assert sorted(row.model_type for row in ROWS) == sorted(MODEL_TYPES)
    assert (
        page(sorted(ROWS, key=lambda row: list(MODEL_TYPES).index(row.model_type)))
        == PAGE.read_text()
    )


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")  # of transformers, on odd configurations
@pytest.mark.parametrize("model_type", [one for one in FEW if one in MODEL_TYPES])
def test_a_few_rows_are_true(model_type: str, tmp_path: Path) -> None:
    _check(model_type, tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [one for one in MODEL_TYPES if one not in FEW])
def test_all_other_rows_are_true(model_type: str, tmp_path: Path) -> None:
    _check(model_type, tmp_path)


def _check(model_type: str, folder: Path) -> None:
    found = verdict(model_type, folder)
    if SAME_VERSION:
        assert found in ROWS
    else:
        assert found.result in ("served", "refused"), found.reason
