#!/usr/bin/env bash
# Try the pre-commit hook with pre-commit itself: this folder, as committed, becomes the root of a repository of its own;
# a project that uses it commits a script with a bug, which must fail, and the same script without it, which must pass.
# Needs git subtree and an index with pre-commit and the package's dependencies. Takes minutes.
set -euo pipefail
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PRE_COMMIT_HOME=$scratch/cache PIP_CONSTRAINT=$repository/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
export GIT_AUTHOR_NAME=hook GIT_AUTHOR_EMAIL=hook@localhost GIT_COMMITTER_NAME=hook GIT_COMMITTER_EMAIL=hook@localhost

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet pre-commit

git clone --quiet "$repository" "$scratch/halfstep"
split=$(git -C "$scratch/halfstep" subtree split -q --prefix packages/halfstep-check)
git init --quiet "$scratch/halfstep-check"
git -C "$scratch/halfstep-check" fetch --quiet "$scratch/halfstep" "$split"
git -C "$scratch/halfstep-check" checkout --quiet FETCH_HEAD

git init --quiet "$scratch/project" && cd "$scratch/project"
cat > .pre-commit-config.yaml <<YAML
repos:
  - repo: $scratch/halfstep-check
    rev: $split
    hooks: [{id: halfstep-check}]
YAML
cat > train.py <<'PYTHON'
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
PYTHON
git add . && "$scratch/venv/bin/pre-commit" install
if git commit --quiet -m "A bug" > bug.log 2>&1; then
    cat bug.log && echo "the hook let a bug pass" && exit 1
fi
cat bug.log && grep -q "clip-before-unscale" bug.log
sed -i.bak 's/^    torch.nn.utils/    scaler.unscale_(optimizer)\n&/' train.py
git add train.py && git commit -m "No bug"
echo "the hook stops a bug and lets the fix pass"
