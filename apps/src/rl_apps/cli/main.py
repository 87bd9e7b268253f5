"""`rl`: run an app, or inspect its runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl_apps.cli.overview import overview
from rl_apps.settings.command_line import Parser, print_all
from rl_contracts import registry
from rl_contracts.config import require
from rl_contracts.errors import ConfigError, DataError, RLError, did_you_mean
from rl_contracts.runtime.terminal import hide_deprecations, leave_pipe, replace_what_no_terminal_shows

_MEANT = {
    "figures": " It was renamed to 'metrics'.",
    "train": " Use an app, such as `rl grpo` or `rl sft`.",
}
"""Hints for words that are no command."""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Returns its exit code."""
    replace_what_no_terminal_shows()
    hide_deprecations()
    if "" not in sys.path:
        sys.path.append("")  # sys.path[0] is the script's directory; dotted paths may name files in the current one
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        if arguments.command == "run":
            from rl_apps.cli import driver

            return driver.main(arguments.app, arguments.arguments)
        own = {
            "replay": _replay,
            "metrics": _metrics,
            "evaluate": _evaluate,
            "generate": _generate,
            "serve": _serve,
            "doctor": _doctor,
            "demo": _demo,
            "plan": _plan,
        }
        code = own.get(arguments.command, _tool)(arguments)
        sys.stdout.flush()
        return code
    except RLError as error:
        print(f"rl: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `rl logs RUN | head`
        return leave_pipe()


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line whose first word is a subcommand or an app.

    Raises:
        ConfigError: the first word is neither, or the arguments are invalid.
    """
    apps = registry.available("rl.apps")
    parser = Parser(
        prog="rl",
        usage="rl COMMAND ...",
        epilog="`rl COMMAND --help` lists the settings of an app or the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersions, nargs=0, help="print the versions of packages, and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="rl", help=argparse.SUPPRESS
    )
    run = commands.add_parser("run", add_help=False, help="run an app by name, or your own app: package.module:APP")
    run.add_argument("app", help="installed name, or package.module:APP")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="settings and flags of the app; see its --help")
    replay = commands.add_parser("replay", help="replay a saved batch through the trainer, without servers")
    replay.add_argument(
        "run", type=Path, help="run directory (checkpoint.save_batches=true), or one file of its batches/"
    )
    replay.add_argument("--step", type=int, help="step of the batch (default: the last saved one)")
    replay.add_argument("--model", help="initial weights (default: the run's initial model)")
    replay.add_argument(
        "--allocation", help="trainer ranks, for example fsdp:d2 (default: one rank of the run's engine)"
    )
    replay.add_argument("overrides", nargs="*", help="settings to change, for example actor.optimizer.lr=0")
    _add_runs(commands)
    _add_models(commands)
    _add_checks(commands)
    parser.description = overview(apps, {action.dest: action.help or "" for action in commands._choices_actions})
    names = (*commands.choices, *apps)
    if argv and argv[0] not in (*names, "-h", "--help", "--version"):
        options = " Options follow the command." if argv[0].startswith("-") else ""
        near = options or _MEANT.get(argv[0]) or did_you_mean(argv[0], names)
        raise ConfigError(f"{argv[0]}: there is no such command or app.{near} `rl --help` lists them.")
    if argv and argv[0] in apps and argv[0] not in commands.choices:  # `rl grpo` is `rl run grpo`
        argv = ["run", *argv]
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command in ("plan", "evaluate"):  # models and settings may follow options
        words = arguments.settings if arguments.command == "plan" else arguments.words
        words += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        commands.choices[arguments.command].error(f"unknown arguments: {' '.join(unknown)}")
    return arguments


class _PrintVersions(argparse.Action):
    """Print the versions of the rl packages, Python, torch and transformers, and the commit of a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from rl_monitor.report.facts import facts_of

        facts = facts_of([])
        versions = {name: version for name, version in facts["packages"].items() if name.startswith("rl-")}
        versions["python"] = facts["python"]
        versions |= {name: facts["packages"].get(name, "not installed") for name in ("torch", "transformers")}
        lines = [f"{name} {version}" for name, version in versions.items()]
        lines += [f"commit {commit} ({directory})" for directory, commit in facts["commits"].items()]
        print_all("\n".join(lines))
        parser.exit()


def _count(text: str) -> int:
    """Parse a positive number of items to print."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _add_runs(commands: Any) -> None:
    """Add the subcommands for existing runs."""
    status = commands.add_parser("status", help="show a run's state and where its processes run")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    logs = commands.add_parser("logs", help="print the logs of a run's processes")
    stop = commands.add_parser(
        "stop", help="stop a run after its current step, with a recovery checkpoint; a second call stops sooner"
    )
    stop.add_argument("--now", action="store_true", help="kill the processes at once")
    scale = commands.add_parser("scale", help="change the number of inference servers during a run")
    watch = commands.add_parser("watch", help="follow the metrics of a run, or its conversations")
    watch.add_argument("--conversations", action="store_true", help="follow prompts and completions")
    watch.add_argument("--step", type=int, help="only this step (default: the newest step and later ones)")
    watch.add_argument("--evaluation", action="store_true", help="conversations of evaluations")
    watch.add_argument("--prompt", type=int, help="only conversations of this example of the data")
    watch.add_argument("-n", "--number", type=_count, help="conversations per step (default 2)")
    show = commands.add_parser("show", help="print completions of a step with rewards and advantages")
    show.add_argument("--step", type=int, help="step (default: the newest)")
    show.add_argument("--worst", action="store_true", help="lowest rewards first")
    show.add_argument("--evaluation", action="store_true", help="completions of an evaluation")
    show.add_argument("-n", "--number", type=_count, default=4, help="number of completions (default %(default)s)")
    plot = commands.add_parser("plot", help="plot metrics of runs in the terminal or to a file")
    plot.add_argument("--metric", action="append", default=[], help="metric in metrics.jsonl; may be repeated")
    plot.add_argument("-o", "--output", type=Path, help="PNG, SVG or PDF file (needs rl-apps[plot])")
    report = commands.add_parser("report", help="write report.html; with several runs, compare them")
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        help="default: report.html in the run directory, or ./comparison.html for several runs",
    )
    for tool in (plot, report):
        tool.add_argument("run", type=Path, nargs="+", help="run directories")
    for tool in (status, logs, stop, scale, watch, show):
        tool.add_argument("run", type=Path, help="run directory, on any machine that can read it")
    logs.add_argument("worker", nargs="?", default="", help="role, or <role>-<index> (default: all)")
    logs.add_argument("-f", "--follow", action="store_true", help="follow until the run ends")
    logs.add_argument(
        "-n", "--lines", type=_count, default=30, help="lines from the end of each log (default %(default)s)"
    )
    scale.add_argument("target", metavar="ROLE=COUNT", help="for example rollout=4")
    for tool, seconds in ((stop, 120.0), (scale, 600.0)):
        text = "seconds to wait for the outcome (default %(default)g)"
        tool.add_argument("--timeout", type=float, default=seconds, help=text)


def _add_checks(commands: Any) -> None:
    """Add the subcommands that check or estimate."""
    doctor = commands.add_parser("doctor", help="check that this machine (and a command's settings) can run")
    doctor.add_argument("app", nargs="?", default="", help="also run one small step of this command")
    doctor.add_argument("settings", nargs=argparse.REMAINDER, help="settings of the command, key=value")
    doctor.add_argument("--directory", type=Path, default=Path("runs"), help="directory for runs (default %(default)s)")
    plan = commands.add_parser("plan", help="estimate memory and throughput, and find the best split")
    plan.add_argument("app", help="command that uses servers, such as gsm8k-grpo")
    plan.add_argument(
        "settings", nargs="*", help="settings of the command, key=value; also cluster.nodes and cluster.devices"
    )
    plan.add_argument("--gpu", default="", help="GPU model, such as H100; its data sheet fills in unmeasured rates")
    plan.add_argument(
        "--memory", type=float, default=0.0, metavar="GIB", help="memory of a device (default: from its data sheet)"
    )
    plan.add_argument("--rates", type=Path, metavar="FILE", help="YAML file of measured rates")
    plan.add_argument("--run", type=Path, help="run directory with measured rates; its settings are the defaults")
    plan.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings, as for the command")
    plan.add_argument("--no-splits", action="store_true", help="plan only the given (or default) allocation")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    demo = commands.add_parser("demo", help="inject a fault into a short run and show how it is detected")
    demo.add_argument("fault", nargs="?", default="", help="default: list the faults")


def _add_models(commands: Any) -> None:
    """Add the subcommands for metrics and models."""
    metrics = commands.add_parser("metrics", help="explain the metrics in metrics.jsonl")
    metrics.add_argument("name", nargs="?", default="", help="metric, or a prefix (default: all)")
    metrics.add_argument("--markdown", action="store_true", help="print Markdown, as in docs/metrics.md")
    evaluate = commands.add_parser("evaluate", help="evaluate models on data sets: accuracy, pass@k, maj@k")
    evaluate.add_argument(
        "words",
        nargs="+",
        metavar="MODEL",
        help="runs (best or newest checkpoint, with their settings), checkpoints, model directories or hub ids; and "
        "settings, such as data.name=gsm8k evaluation.n=8 allocation=vllm:d1",
    )
    evaluate.add_argument(
        "--by", action="append", default=[], metavar="COLUMN", help="also report each value of a column of the data"
    )
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write all numbers and the sampling settings")
    evaluate.add_argument("--dry-run", action="store_true", help="end after all checks, before anything starts")
    evaluate.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with the completions")
    generate = commands.add_parser("generate", help="chat with a trained model")
    generate.add_argument("model", type=Path, help="run directory (its last checkpoint) or model directory")
    generate.add_argument("--prompt", help="a single prompt (default: a conversation, one line per turn)")
    generate.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy (default 1)")
    generate.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling mass (default 1)")
    generate.add_argument(
        "--max-new-tokens", type=int, default=256, help="maximum tokens per completion (default %(default)s)"
    )
    generate.add_argument("--seed", type=int, help="random seed")
    generate.add_argument("--system", default="", help="system message")
    generate.add_argument("--device", default="", choices=("cpu", "cuda"), help="default: cuda if available")
    serve = commands.add_parser("serve", help="serve a trained model with OpenAI's HTTP API")
    serve.add_argument("model", type=Path, help="run directory (its last checkpoint) or model directory")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default %(default)s); other machines need a key, in the environment as RL_API_KEY",
    )
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default %(default)s)")
    serve.add_argument("--device", default="", choices=("cpu", "cuda"), help="default: cuda if available")
    serve.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights; auto: bfloat16 on a GPU that has it, otherwise float32 (default %(default)s)",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from rl_apps.cli.doctor import doctor

    return doctor(arguments.app, arguments.settings, arguments.directory)


def _plan(arguments: argparse.Namespace) -> int:
    from rl_apps.plan.inputs import read_inputs

    memory = arguments.memory * 2**30
    files = (arguments.rates, arguments.run, arguments.config)
    inputs = read_inputs(arguments.app, arguments.settings, arguments.gpu, memory, *files)
    from rl_apps.plan import page, planner  # slow to import: after the checks of the arguments

    result = planner.plan(inputs, splits=not arguments.no_splits)
    print(page.line(result) if arguments.json else page.page(result))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from rl_apps.cli.demo import DEMOS, demo

    if arguments.fault:
        return demo(arguments.fault)
    print(*(f"{name:<18} {scenario.what}" for name, scenario in DEMOS.items()), sep="\n")
    return 0


def _tool(arguments: argparse.Namespace) -> int:
    """Run a subcommand for the directory of a run."""
    if arguments.command in ("show", "plot", "report"):
        return _show(arguments)
    from rl_apps.cli import run_tools

    run = arguments.run.resolve()
    if arguments.command == "status":
        return run_tools.status(run, arguments.json)
    if arguments.command == "logs":
        return run_tools.logs(run, arguments.worker, arguments.lines, arguments.follow)
    if arguments.command == "stop":
        return run_tools.stop(run, arguments.now, arguments.timeout)
    if arguments.command == "watch":
        from rl_monitor.watch import watch, watch_steps

        selection = (arguments.step, arguments.prompt, arguments.number)
        if not (arguments.conversations or arguments.evaluation or any(value is not None for value in selection)):
            return watch_steps(run)
        number = 2 if arguments.number is None else arguments.number
        return watch(run, arguments.step, arguments.evaluation, arguments.prompt, number)
    role, _, count = arguments.target.partition("=")
    require(role != "" and count.isdecimal(), "rl scale", "ROLE=COUNT, for example rollout=4", arguments.target)
    return run_tools.scale(run, role, count, arguments.timeout)


def _show(arguments: argparse.Namespace) -> int:
    """Run `rl show`, `rl plot` or `rl report`."""
    from rl_monitor import show as showing

    if arguments.command == "show":
        run = arguments.run.resolve()
        return showing.show(run, arguments.step, arguments.evaluation, arguments.worst, arguments.number)
    runs = list(dict.fromkeys(run.resolve() for run in arguments.run))
    if arguments.command == "plot":
        return showing.plot(runs, arguments.metric, arguments.output)
    return showing.report(runs, arguments.output)


def _metrics(arguments: argparse.Namespace) -> int:
    from rl_monitor import metrics_command

    print(metrics_command.page() if arguments.markdown else metrics_command.table(arguments.name), end="")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl_apps.cli import evaluate

    return evaluate.evaluate(arguments.words, arguments.by, arguments.json, arguments.page, arguments.dry_run)


def _generate(arguments: argparse.Namespace) -> int:
    from rl_apps.cli import generate
    from rl_contracts.config import GenerationConfig

    generation = GenerationConfig(
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, top_p=arguments.top_p
    )
    directory = generate.model_of(arguments.model)
    session = generate.ChatSession(directory, generation, arguments.system, arguments.device, arguments.seed)
    return generate.chat(session, arguments.prompt)


def _serve(arguments: argparse.Namespace) -> int:
    from rl_apps.cli.serve import serve

    return serve(arguments.model, arguments.host, arguments.port, arguments.device, arguments.dtype)


def _replay(arguments: argparse.Namespace) -> int:
    from rl_apps.cli.driver import trainer_job
    from rl_apps.preflight.checks import check_algorithm, check_architectures, check_run
    from rl_apps.run.app import Run
    from rl_apps.settings.compose import compose, to_yaml
    from rl_apps.settings.config import GRPOConfig
    from rl_apps.settings.device_layout import devices_of, layout_of
    from rl_apps.settings.dtypes import gpus_have_bfloat16, resolve_dtypes
    from rl_apps.settings.model import find_models
    from rl_launchers import Launcher

    batch = find_batch(arguments.run, arguments.step)
    file = batch.parent.parent / "config.yaml"
    allocation = arguments.allocation
    if allocation is None:
        allocation = f"{layout_of(compose(GRPOConfig, [file]).allocation, 'optional').actor.backend}:d1"
    config = compose(GRPOConfig, [file], [f"allocation={allocation}", *arguments.overrides])
    if arguments.model:
        config.ref.path = config.ref.path or config.model.path  # keep the reference model of the run
        config.model.path = arguments.model
    layout = layout_of(config.allocation, "rejected")
    devices = devices_of(layout, config.cluster, config.launcher)
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as scratch:
        config.model.directories |= find_models(config.model_paths())
        resolve_dtypes(config, devices.kind == "cuda" and gpus_have_bfloat16())
        run = Run(config, layout, Path(scratch), devices.kind)
        check_run(run)
        check_algorithm(run)
        check_architectures(run)
        print(devices.sentence, file=sys.stderr)
        (run.directory / "config.yaml").write_text(to_yaml(config))
        (run.directory / batch.name).symlink_to(batch)
        launcher = Launcher(config.launcher.scheduler(run.directory / "logs"), config.launcher)
        code = launcher.run([], lambda _: [trainer_job("rl_apps.programs.replay:APP", run, devices, [])])
        if code == 0:
            print(json.dumps(json.loads((run.directory / "result.json").read_text()), indent=2))
    return code


def find_batch(run: Path, step: int | None) -> Path:
    """Return the file of a saved batch.

    Raises:
        DataError: the run saved no batch, or none of that step.
        ConfigError: a step was given together with a file.
    """
    if run.is_file():
        if step is not None:
            raise ConfigError("--step needs a run directory, not a batch file; omit it.")
        if run.suffix != ".safetensors":
            raise DataError(f"{run}: expected a run directory, or a file of its batches/ (step_<n>-....safetensors).")
        return run.resolve()
    matches = ((re.match(r"step_(\d+)-", path.name), path) for path in (run / "batches").glob("step_*.safetensors"))
    batches = {int(match[1]): path for match, path in matches if match}
    if not batches:
        raise DataError(f"{run}: no saved batches. Run with checkpoint.save_batches=true to keep them.")
    chosen = max(batches) if step is None else step
    if chosen not in batches:
        raise DataError(f"{run}: no batch of step {chosen}; the run saved batches of steps {sorted(batches)}.")
    return batches[chosen].resolve()


if __name__ == "__main__":
    sys.exit(main())
