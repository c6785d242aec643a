# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The typer application and the entry point `kvspeed`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvspeed import __version__
from kvspeed.cli.ask import ask
from kvspeed.cli.choose_depth import choose_depth
from kvspeed.cli.demo import demo
from kvspeed.cli.diagnose import diagnose
from kvspeed.cli.doctor import doctor
from kvspeed.cli.evaluate_speed import app as evaluate
from kvspeed.cli.pack import pack
from kvspeed.cli.store import app as store
from kvspeed.cli.train_adapter import train_adapter
from kvspeed.cli.tune_speed import tune_speed

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvspeed",
    help="Long prompts made cheap: shallow prefill (SPEED) and precomputed documents (KV packets).",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(doctor)
app.command()(pack)
app.command()(ask)
app.command("train-adapter")(train_adapter)
app.command("tune-speed")(tune_speed)
app.add_typer(evaluate, name="eval")
app.add_typer(store, name="store")
app.command()(diagnose)
app.command("choose-depth")(choose_depth)


def _version(asked: bool) -> None:
    if asked:
        print(f"kvspeed {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point; exit codes: 0 done, 1 a self-check failed, 2 a wrong request, 130 interrupted."""
    sys.exit(app())
