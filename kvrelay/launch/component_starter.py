"""Starts the components of a cluster as child processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.child_command import ChildCommand


class ComponentStarter:
    """Gives each child its own configuration file in one folder, and one log file to all."""

    def __init__(self, folder: Path, log_file: IO[bytes] | None = None) -> None:
        """folder: of this process alone. log_file: instead of this process's stderr."""
        self.folder = folder
        self._log_file = log_file
        self._numbers = itertools.count()

    async def start(
        self,
        name: str,
        config: ClusterConfig,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
    ) -> ChildCommand:
        """Starts the command `kvrelay NAME` with this configuration. `variables` are added to the
        environment.
        """
        number = next(self._numbers)
        # Something may have emptied the folder of temporary files.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # JSON is valid YAML.
        config_file = self.folder / f"{number}.yaml"
        config_file.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        return await ChildCommand.start(
            name,
            "--config",
            str(config_file),
            *arguments,
            variables=variables,
            log_file=self._log_file,
            reason_file=self.folder / f"{number}.reason",
        )
