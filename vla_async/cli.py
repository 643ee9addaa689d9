"""``VLACLI``: the command line, a LightningCLI for :class:`~vla_async.trainer.AsyncTrainer`.

One YAML file with the sections trainer, model and env serves all subcommands::

    vla-async sft --config recipes/maniskill_pushcube_sft_ppo.yaml --trainer.max_steps 100
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from vla_async import __version__
from vla_async.commands import SUBCOMMANDS
from vla_async.envs import EnvFactory
from vla_async.loops import CollectLoop, EvaluateLoop, EvaluationResult, SFTLoop, SyncFitLoop
from vla_async.monitor.report import evaluation_table
from vla_async.policies import VLAPolicy
from vla_async.refusals import ConfigError, check_command_line, check_nulls, explain, subclass_names
from vla_async.state import find_checkpoint
from vla_async.trainer import AsyncTrainer

# written out in every printed and saved configuration, so that it says what ran
_DEFAULT_LOOPS = {"fit_loop": SyncFitLoop, "sft_loop": SFTLoop, "evaluate_loop": EvaluateLoop, "collect_loop": CollectLoop}


class VLAArgumentParser(LightningArgumentParser):
    """A parser that takes a trainer of our own."""

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        if nested_key != "trainer":
            return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        added: list[str] = self.add_class_arguments(
            lightning_class, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
        )
        self.set_defaults(
            {f"trainer.{key}": {"class_path": f"vla_async.loops.{loop.__name__}"} for key, loop in _DEFAULT_LOOPS.items()}
        )
        return added


class VLACLI(LightningCLI):
    """Parses, builds and runs. Everything happens in the constructor.

    Args:
        args: the command line without the program's name, for example ``["fit", "--config", "recipe.yaml"]``.

    Attributes:
        trainer: the trainer that ran.
        model: the policy that it ran on.
        result: what the subcommand returned.

    Raises:
        ConfigError: if the command line or the configuration is wrong; its message names the key and the choices.
    """

    trainer: AsyncTrainer  # type: ignore[assignment]  # LightningCLI knows no other trainer than its own
    model: VLAPolicy
    result: Any

    def __init__(self, args: Sequence[str]) -> None:
        self.result, self._args = None, list(args)
        super().__init__(
            model_class=VLAPolicy,
            subclass_mode_model=True,
            trainer_class=AsyncTrainer,  # type: ignore[arg-type]
            parser_class=VLAArgumentParser,
            save_config_callback=None,  # the trainer writes it, before it starts anything
            auto_configure_optimizers=False,
            args=self._args,
        )

    # ------------------------------------------------------------------ what can be said

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # without abbreviations, so that a mistyped key is never taken for another one
        header = [f"vla_async=={__version__}"]
        return super().init_parser(**{**kwargs, "exit_on_error": False, "allow_abbrev": False, "dump_header": header})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        usage = f"vla-async {subcommand} --config FILE [--config FILE ...] [--SECTION.KEY VALUE ...]"
        return super()._prepare_subcommand_parser(klass, subcommand, **{**kwargs, "usage": usage})

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: {"policy", "env"} for name in SUBCOMMANDS}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """None: the seed is ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # required, but the parser's own message for that names neither the key to write nor the choices
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_subclass_arguments(VLAPolicy, "model", required=False, fail_untyped=False)
        parser.add_subclass_arguments(EnvFactory, "env", required=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_command_line(args)
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            subparser = next((self._subcommand_parsers[arg] for arg in args if arg in SUBCOMMANDS), parser)
            raise ConfigError(explain(str(error), subparser)) from error

    # ------------------------------------------------------------------ from what was said to objects

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint holds weights and state; what the policy is stands in the configuration."""

    def _set_seed(self) -> None:
        # the trainer seeds again when a run begins; this is for policies that make their weights when constructed
        lightning.seed_everything(self._get(self.config, "trainer").seed, verbose=False)

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        for key, base in {"env": EnvFactory, "model": VLAPolicy}.items():
            if config.get(key) is None and (key, self.subcommand) != ("model", "collect"):
                fix = f"give a --config file with a section {key}, or --{key} CLASS"
                raise ConfigError(f"{key} is not set; {fix}\n  choices: {', '.join(subclass_names(base))}")
            check_nulls(key, config.get(key))
        for key, value in vars(config.trainer).items():
            check_nulls(f"trainer.{key}", value)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the parser wraps what a constructor said once per level
                cause = cause.__cause__
            raise ConfigError(str(cause)) from error

    def after_instantiate_classes(self) -> None:
        self.trainer.config_text = self.config_text()

    def config_text(self) -> str:
        """The resolved configuration, complete and good for ``--config``, under the command line that led to it."""
        config = self.config[self.subcommand].clone()
        config.pop("config", None)
        # it belongs to the command: a run that repeats this one is not a resumed one
        is_resumed, trainer = config.pop("ckpt_path", None) is not None, self.trainer
        if trainer.init_from is not None and self.subcommand in ("fit", "sft") and not is_resumed:
            # the file, because what `last` and `best` mean changes with every run
            found = find_checkpoint(trainer.init_from, trainer.root_dir, trainer.name, prefer="sft")
            config.trainer.init_from = None if found is None else str(found[1])
        text: str = self._parser(self.subcommand).dump(config, skip_none=False)
        return f"# {shlex.join(['vla-async', *self._args])}\n{text}"

    # ------------------------------------------------------------------ what is done

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs["policy"] = kwargs.pop("model")
        return {**kwargs, "env": self._get(self.config_init, "env")}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except KeyboardInterrupt:
            run = getattr(self.trainer, "run", None)  # none yet, if it came very early
            last = Path() if run is None else run.checkpoints / "last.ckpt"
            print(f"interrupted; resume from {last} with --ckpt_path last" if last.is_file() else "interrupted", flush=True)
            raise

    # LightningCLI calls these in place of the trainer's methods of the same name

    def validate(self, **kwargs: Any) -> None:
        """Evaluate on the validation seeds, and print the result."""
        self._report(self.trainer.validate(**kwargs))

    def test(self, **kwargs: Any) -> None:
        """Evaluate on the test seeds, and print the result."""
        self._report(self.trainer.test(**kwargs))

    def collect(self, **kwargs: Any) -> None:
        """Collect demonstrations, and print how many attempts they took."""
        self.result = report = self.trainer.collect(**kwargs)
        counts = f"{report.episodes} successful episodes of {report.attempts} attempts, {report.frames:,} env steps"
        print(f"{counts}: {report.directory}")

    def _report(self, result: EvaluationResult) -> None:
        self.result = result
        evaluation_table(result).print()
        if self._get(self.config, "ckpt_path") is None and self.trainer.init_from is None:
            print("these are the policy's initial weights: neither --ckpt_path nor trainer.init_from is given")
        print(f"run directory: {self.trainer.run.path}")
