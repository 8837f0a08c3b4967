"""``python -m model.presets``: list the presets, or show, draw or print one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from model.errors import UserError, run_command
from model.pictures import draw_preset
from model.presets import preset, preset_names
from model.tables import preset_table


def run_presets(arguments: list[str]) -> None:
    """List presets, or show one.

    Raises:
        UserError: an unknown preset, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m model.presets", description="List the model presets.")
    parser.add_argument("name", nargs="?", help="show this preset only")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the preset's head schedule, for example heads.png"
    )
    parser.add_argument("--json", action="store_true", help="print the preset's config as JSON")
    options = parser.parse_args(arguments)
    if options.name is None and (options.plot or options.json):
        raise UserError("name: --plot and --json need the name of a preset")
    names = [options.name] if options.name is not None else preset_names()
    if options.json:
        print(json.dumps(preset(options.name).to_json(), indent=2))
    else:
        print(preset_table(names))
    if options.plot:
        draw_preset(options.name, options.plot)
        if not options.json:
            print(f"wrote {options.plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_presets, arguments)


if __name__ == "__main__":
    sys.exit(main())
