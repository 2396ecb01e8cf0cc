"""tpu/*.sh against a gcloud that only writes down what it is asked."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
# Answers the n-th call of a kind with the n-th line of a file of that name;
# the last line goes on.
GCLOUD = """#!/bin/bash
echo "$*" >> "$STUB/calls"
kind="$3-$4"  # compute tpus KIND VERB
n=$(grep -c -- "$3 $4" "$STUB/calls")
if [[ -f "$STUB/$kind" ]]; then
  answer=$(sed -n "${n}p" "$STUB/$kind")
  [[ -n "$answer" ]] || answer=$(tail -n 1 "$STUB/$kind")
  [[ "$answer" == exit* ]] && exit "${answer#exit}"
  echo "$answer"
fi
"""


@pytest.fixture
def slice_(tmp_path):
  """run(script, *args, answers={kind: lines}, **environment)."""
  folder = tmp_path / "bin"
  folder.mkdir()
  stub = folder / "gcloud"
  stub.write_text(GCLOUD)
  stub.chmod(0o755)

  def run(script, *args, answers=None, **environment):
    for kind, lines in (answers or {}).items():
      (tmp_path / kind).write_text("\n".join(lines) + "\n")
    done = subprocess.run(
      ["bash", ROOT / "tpu" / script, *args],
      env={
        "PATH": f"{folder}:/usr/bin:/bin",
        "STUB": str(tmp_path),
        "TPU_POLL": "0",
        "TPU_NAME": "eagle",
        "TPU_ZONE": "z",
        "TPU_TYPE": "v6e-8",
      }
      | environment,
      capture_output=True,
      text=True,
    )
    calls = tmp_path / "calls"
    said = calls.read_text().splitlines() if calls.exists() else []
    return done, said

  return run


def verbs(calls: list[str]) -> list[str]:
  """The calls that change or use something, in order."""
  found = [" ".join(c.split()[2:4]) for c in calls if c.startswith("compute")]
  return [v for v in found if not v.endswith("describe")]


NEW = {
  "queued-resources-describe": ["exit1", "WAITING_FOR_RESOURCES", "ACTIVE"]
}


def test_setup_creates_waits_and_installs(slice_):
  done, calls = slice_("setup.sh", answers=NEW, TPU_DISK="gs://b")
  assert done.returncode == 0, done.stderr
  assert verbs(calls) == [
    "queued-resources create",
    "tpu-vm scp",
    "tpu-vm ssh",
    "tpu-vm ssh",
  ]
  create = next(c for c in calls if "create" in c)
  for word in ("--accelerator-type v6e-8", "v2-alpha-tpuv6e", "--spot"):
    assert word in create
  text = "\n".join(calls)
  assert "--worker all" in text
  assert "eagle_jax[tpu]" in text
  assert "gcsfuse --implicit-dirs b runs" in text
  assert "slice eagle is ready" in done.stdout


def test_setup_keeps_a_slice_that_is_there(slice_):
  done, calls = slice_(
    "setup.sh",
    answers={
      "queued-resources-describe": ["ACTIVE"],
      "tpu-vm-describe": ["READY"],
    },
  )
  assert done.returncode == 0, done.stderr
  assert verbs(calls) == ["tpu-vm scp", "tpu-vm ssh"]


def test_on_demand(slice_):
  _, calls = slice_("setup.sh", answers=NEW, TPU_SPOT="0")
  assert "--spot" not in next(c for c in calls if "create" in c)


def test_run_goes_on_after_a_preemption(slice_):
  """First try: taken away. Then the slice is removed, made and installed anew
  and the same command runs again."""
  done, calls = slice_(
    "run.sh",
    "train.py",
    "--config.data=('a b.jsonl',)",
    answers={
      "tpu-vm-ssh": ["exit255", "installed", "mounted", "trained"],
      "tpu-vm-describe": ["PREEMPTED"],
      "queued-resources-describe": ["ACTIVE", "CREATING", "ACTIVE"],
    },
    TPU_DISK="gs://b",
  )
  assert done.returncode == 0, done.stderr
  assert verbs(calls) == [
    "tpu-vm ssh",
    "queued-resources delete",
    "queued-resources create",
    "tpu-vm scp",
    "tpu-vm ssh",
    "tpu-vm ssh",
    "tpu-vm ssh",
  ]
  runs = [c for c in calls if "train.py" in c]
  assert len(runs) == 2
  assert runs[0] == runs[1]
  command = runs[0].split("--command ")[1]
  assert command.startswith("cd eagle_jax && ../venv/bin/python train.py ")
  # what the worker's shell makes of it
  words = subprocess.run(
    [
      "bash",
      "-c",
      command.replace("cd eagle_jax && ../venv/bin/python", "printf '%s\\n'"),
    ],
    capture_output=True,
    text=True,
  ).stdout.splitlines()
  assert words == ["train.py", "--config.data=('a b.jsonl',)"]


def test_run_reports_the_commands_own_failure(slice_):
  done, calls = slice_(
    "run.sh",
    "decode.py",
    answers={"tpu-vm-ssh": ["exit2"], "tpu-vm-describe": ["READY"]},
  )
  assert done.returncode == 2
  assert verbs(calls) == ["tpu-vm ssh"]


@pytest.mark.parametrize(
  ("script", "args", "change", "words"),
  [
    ("setup.sh", [], {"TPU_NAME": ""}, "TPU_NAME is not set"),
    ("setup.sh", [], {"TPU_TYPE": "h100"}, "h100 is not v6e-N"),
    ("setup.sh", [], {"TPU_DISK": "b"}, "must start with gs://"),
    ("run.sh", [], {}, "no command"),
    ("run.sh", ["rm"], {}, "rm is not train.py or decode.py"),
    ("run.sh", ["train.py"], {}, "needs a bucket to resume from"),
  ],
)
def test_refusals(slice_, script, args, change, words):
  done, calls = slice_(script, *args, **change)
  assert done.returncode == 2
  assert words in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert calls == []


def test_shellcheck():
  found = shutil.which("shellcheck", path=pathlib.Path(sys.executable).parent)
  if found is None:
    pytest.skip("shellcheck is not installed (pip install '.[test]')")
  scripts = sorted(map(str, (ROOT / "tpu").glob("*.sh")))
  assert len(scripts) == 3
  done = subprocess.run(
    [found, "-x", "-P", str(ROOT), *scripts], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout


def test_jobset():
  """As many pods as the topology has hosts; all of the pod's paths exist."""
  whole = yaml.safe_load((ROOT / "tpu" / "jobset.yaml").read_text())
  job = whole["spec"]["replicatedJobs"][0]["template"]["spec"]
  pod = job["template"]["spec"]
  x, y = map(
    int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  )
  container = pod["containers"][0]
  chips = container["resources"]["limits"]["google.com/tpu"]
  assert job["parallelism"] == job["completions"] == x * y // chips
  script, config = container["command"][1:3]
  assert (ROOT / script).exists()
  assert (ROOT / config.removeprefix("--config=")).exists()
  assert whole["spec"]["failurePolicy"]["maxRestarts"] > 0
