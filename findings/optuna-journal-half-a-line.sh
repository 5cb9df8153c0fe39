#!/usr/bin/env bash
# optuna==5.0.0. Seen 2026-11-28.
# A JournalFileBackend whose last write was cut off (a full disk) ends in half a line. The study still opens, and the next
# trial is appended to that half line: then no process can open the study any more, and all of its trials are lost to it
# (JSONDecodeError). Neither the failed write is undone, nor the end of the file looked at before a line is added.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --disable-pip-version-check --target "$work/p" "optuna==5.0.0" >"$work/log" 2>&1 || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 python3 -W ignore - <<'PY'
import os
import resource
import signal
import sys

import optuna
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.ERROR)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def opened():
    storage = optuna.storages.JournalStorage(JournalFileBackend(os.path.abspath("study.log")))
    return optuna.create_study(storage=storage, study_name="study", load_if_exists=True)


study = opened()
for value in (1.0, 2.0):
    study.add_trial(optuna.trial.create_trial(value=value))
# No room for the next trial: the file may grow by 40 bytes.
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize("study.log") + 40, resource.RLIM_INFINITY))
try:
    study.add_trial(optuna.trial.create_trial(value=3.0))
    written = True
except OSError as error:
    written = False
    print(f"the third trial: {error}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = len(opened().trials)
print(f"opened again: {again} trials")
try:
    opened().add_trial(optuna.trial.create_trial(value=4.0))
except ValueError as error:
    print(f"the fourth trial: {type(error).__name__}")
try:
    print(f"opened again: {len(opened().trials)} trials")
    lost = False
except ValueError as error:
    lost = True
    print(f"opened again: {type(error).__name__}: {error}")
sys.exit(0 if not written and again == 2 and lost else 1)
PY
