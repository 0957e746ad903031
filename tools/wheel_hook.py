"""Include OpenSeadragon in the wheel: download it when the wheel is built, if it is missing."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from fetch_openseadragon import fetch


class OpenSeadragonHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # `make setup` fetches it
        problem = fetch()
        if problem:
            self.app.display_warning(problem)
