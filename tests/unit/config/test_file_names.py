"""Names of files in configurations and policies: any text is a file or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.yaml_file import YamlFile
from kvrelay.errors import ConfigError

NAMES = st.text(st.characters(), min_size=1, max_size=400).filter(lambda name: name.strip("./ "))


@given(NAMES)
@example("x" * 5000)
@example("a\0b")
@example("half \ud83d")
def test_any_name_of_a_file_is_refused_in_one_sentence(name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "file.yaml")
        # JSON is YAML. Characters that YAML forbids are refused before.
        path.write_text(json.dumps({"autoscaling": name}))
        for read in (
            lambda: load_config(path, {}),
            lambda: YamlFile.read(Path(folder, name)),
        ):
            with pytest.raises(ConfigError) as caught:
                read()
            assert len(caught.value.message) < 1500
        path.write_text(json.dumps({"profile": name}))
        with pytest.raises(ConfigError) as caught:
            load_policy(path)
        assert len(caught.value.message) < 1500
