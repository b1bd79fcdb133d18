"""docs/models.md against the installed transformers: served means the tokens of `generate`, and the
rest is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from model_sweep import MODEL_TYPES, Verdict, verdict
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

pytestmark = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"the page was made with transformers {VERSION}; here is {transformers.__version__}",
)


def test_every_class_of_transformers_has_its_row() -> None:
    assert sorted(row.model_type for row in ROWS) == sorted(MODEL_TYPES)
    assert (
        page(sorted(ROWS, key=lambda row: list(MODEL_TYPES).index(row.model_type)))
        == PAGE.read_text()
    )


@pytest.mark.filterwarnings("ignore")  # of transformers, on odd configurations
@pytest.mark.parametrize("model_type", FEW)
def test_a_few_rows_are_true(model_type: str, tmp_path: Path) -> None:
    assert verdict(model_type, tmp_path) == _row(model_type)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [one for one in MODEL_TYPES if one not in FEW])
def test_all_other_rows_are_true(model_type: str, tmp_path: Path) -> None:
    assert verdict(model_type, tmp_path) == _row(model_type)


def _row(model_type: str) -> Verdict:
    return next(row for row in ROWS if row.model_type == model_type)
