#!/bin/sh
# Everything from text to checkpoint: reproduce.sh [MODEL_DIR]. Run from the repository's root, after `make setup`.
set -eu
model=$(realpath -m "${1:-runs/k31-tiny}")
mkdir -p "$model"
run=$(pwd)/runs/tiny
python=$(pwd)/.venv/bin/python
cd tools
"$python" -m train_tiny.text "$run"
"$python" -m train_tiny.prepare "$run" "$model"
OMP_WAIT_POLICY=passive nice -n 10 "$python" -u -m train_tiny.train "$run" "$model"
"$python" -m train_tiny.export "$run" "$model"
cp "$run/training.log" "$run/heldout.txt" "$model"
