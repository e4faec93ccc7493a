"""Coverage-guided fuzzing with atheris: image files, bodies, manifests of snapshots, experiment files, raw HTTP.

    python benchmarks/fuzz.py                              # every target, two minutes each
    python benchmarks/fuzz.py http manifest --minutes 10

The targets are those of `tests/serve/fuzzing.py`, where `make test` tries them with fewer inputs. atheris is no
dependency of the project (`pip install atheris`); without it nothing is run. An input that breaks something is kept in
`--out`, and the exit code is 1.
"""

import argparse
import importlib.util
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
INSTRUMENTED = ["dpl", "h11", "python_multipart", "yaml"]  # whole packages: atheris knows no smaller part
LONGEST = 20_000  # bytes of an input
SLOW = 20  # seconds that one input may take


def main() -> None:
    names = ("image", "body", "manifest", "experiment", "http")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each target (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="findings (default: %(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: skipped, as atheris is not installed (pip install atheris)")
    elif args.child:
        fuzz(args.targets[0], args.minutes, args.out)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        sys.exit(any([not run(name, args.minutes, args.out) for name in args.targets or names]))


def run(name: str, minutes: float, out: Path) -> bool:
    """Fuzz one target in a process of its own, which a finding ends; return whether there was none."""
    command = [sys.executable, __file__, name, "--child", "--minutes", str(minutes), "--out", str(out)]
    with (out / f"{name}.log").open("w+") as log:
        good = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0
        log.seek(0)
        text = log.read()
    units = re.findall(r"number_of_executed_units: *(\d+)", text) or re.findall(r"^#(\d+)", text, re.M) or ["0"]
    covered = re.findall(r"\bcov: (\d+)", text) or ["0"]
    outcome = "nothing found" if good else f"FOUND, see {log.name}"
    print(
        f"fuzz: {name}: {int(units[-1]):,} inputs in {minutes:g} minutes, {covered[-1]} branches: {outcome}", flush=True
    )
    return good


def fuzz(name: str, minutes: float, out: Path) -> None:
    """Let atheris invent inputs until the time is over; does not return."""
    import atheris

    sys.path[:0] = [str(TESTS), str(TESTS / "serve")]
    with atheris.instrument_imports(include=INSTRUMENTED):
        import fuzzing
    logging.disable(logging.CRITICAL)
    target = getattr(fuzzing, name)
    corpus = Path(tempfile.mkdtemp(prefix="dpl-corpus-"))
    for number, data in enumerate(fuzzing.CORPUS[target]()):
        (corpus / str(number)).write_bytes(data)
    limits = [f"-max_total_time={int(60 * minutes)}", f"-max_len={LONGEST}", f"-timeout={SLOW}", "-rss_limit_mb=4096"]
    atheris.Setup([name, *limits, "-print_final_stats=1", f"-artifact_prefix={out}/{name}-", str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
