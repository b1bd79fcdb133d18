"""The section `models`: each model has the sections above as defaults, and is checked alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.config_file import load_config, load_one_model
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError

TWO = """\
kv: {block_size: 32, memory: 64MiB}
prefill: {replicas: 2}
decode: {kv: {memory: 32MiB}}
redis: {namespace: blue}
models:
  small: {}
  large:
    model: {max_model_len: 512}
    kv: {memory: 128MiB}
    decode: {replicas: 3}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_each_model_has_what_it_says_and_else_the_defaults(tmp_path: Path) -> None:
    small, large = load_config(written(tmp_path, TWO)).served
    assert [one.model.name for one in (small, large)] == ["small", "large"]
    assert [one.redis.namespace for one in (small, large)] == ["blue@small", "blue@large"]
    assert (small.kv.memory, large.kv.memory) == (64 * 2**20, 128 * 2**20)
    assert (small.kv.block_size, large.kv.block_size) == (32, 32)
    assert [one.pool_kv("decode").memory for one in (small, large)] == [32 * 2**20] * 2
    assert (small.decode.replicas, large.decode.replicas) == (1, 3)
    assert (small.prefill.replicas, large.prefill.replicas) == (2, 2)
    assert (small.model.max_model_len, large.model.max_model_len) == (None, 512)
    assert not small.models


def test_a_cluster_of_one_model_serves_itself() -> None:
    config = load_config(None)
    assert config.served == (config,)
    assert config.redis.namespace == "kvrelay"


def test_an_option_names_the_only_model(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    config = load_config(path, {"model.path": "large", "decode.replicas": 7})
    assert (config.model.name, config.model.path) == ("large", "demo")
    assert (config.decode.replicas, config.kv.memory) == (7, 128 * 2**20)
    assert config.served == (config,)
    assert config.redis.namespace == "blue"
    assert load_one_model(path, {"model.path": "small"}).model.name == "small"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"model.path": "huge"}, "--model: huge is not in the file, whose models are small, large"),
        ({"decode.replicas": 2}, "--decode: the file has the models small, large; name one with"),
        ({"model.dtype": "float32"}, "model.dtype: the file has the models small, large"),
        ({"model.path": "large", "decode.replicas": -1}, "decode.replicas: must be at least 0"),
    ],
    ids=str,
)
def test_an_option_that_names_no_model(
    tmp_path: Path, overrides: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(written(tmp_path, TWO), overrides)


def test_a_command_about_one_model_refuses_several(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has several models, and this command .* --model: small, large"
    ):
        load_one_model(written(tmp_path, TWO))


@pytest.mark.parametrize(
    ("models", "line", "says"),
    [
        (
            "  a:\n    kvv: 1\n",
            3,
            "models.a.kvv: unknown key; did you mean kv? allowed are model, ",
        ),
        ("  a: {}\n  b:\n    kv: {memory: x}\n", 4, "models.b.kv.memory: "),
        ("  a: {redis: {url: embedded}}\n", 2, "models.a.redis: unknown key; "),
        ("  a/b: {}\n", 2, "'a/b' is not a short name"),
        ("  a: 3\n", 2, "models.a: must be a mapping with the keys model, "),
        ("  a: {}\n  b: {model: {name: a}}\n", 3, "models.b: 'a' is also a name of a; give "),
        (
            "  a: {adapters: {serve: [{name: x, path: p}]}}\n"
            "  b: {adapters: {serve: [{name: x, path: q}]}}\n",
            3,
            "models.b: 'x' is also a name of a; ",
        ),
        ("  a: {}\n  b:\n    kv: {memory: auto}\n", 4, "models.b.kv.memory: auto is not supported"),
        ("  a:\n    decode: {replicas: 0}\n", 3, "models.a.decode.replicas: 0 would leave nobody"),
        ("  a:\n    autoscaling: no.yaml\n", 3, "models.a.autoscaling: "),
        (
            "  a:\n    decode: {tensor_parallel: 2, weights: int8}\n",
            3,
            "models.a.decode.weights: int8 cannot be combined",
        ),
        ("".join(f"  m{n}: {{}}\n" for n in range(33)), 1, "models: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_model_is_refused_with_its_line(
    tmp_path: Path, models: str, line: int, says: str
) -> None:
    path = written(tmp_path, f"models:\n{models}")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert refused.value.message.startswith(f"{path}:{line}: ")
    assert says in refused.value.message


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("standby: 1\n")
    path = written(tmp_path, "models:\n  a: {autoscaling: policy.yaml}\n  b: {}\n")
    a, b = load_config(path).served
    assert (a.autoscaling, b.autoscaling) == (str(tmp_path / "policy.yaml"), None)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.text(max_size=6),
    lambda inner: st.dictionaries(st.sampled_from(["path", "replicas", "memory"]), inner),
    max_leaves=4,
)
entries = st.dictionaries(st.sampled_from(list(ClusterConfig.model_fields)), values, max_size=3)


@given(st.dictionaries(st.text(max_size=5) | st.just("a"), entries | values, max_size=3), entries)
def test_any_models_are_a_configuration_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, models: Any, above: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump({**above, "models": models}))
    refused = f"{path}"
    try:
        config = load_config(path)
    except ConfigError as error:
        refused = error.message
    else:
        assert len(config.served) == max(1, len(models or {}))
    assert refused.startswith(str(path))
