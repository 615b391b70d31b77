#!/usr/bin/env bash
# Publishes a real TorchRec checkpoint (two ranks, tables sharded by table, by row and by column), fetches the snapshot
# and shows what came of it. Everything is written under ./weighbridge-data, and may be deleted.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { if [ -t 1 ]; then printf '\n\033[1m$ %s\033[0m\n' "$*"; else printf '\n$ %s\n' "$*"; fi; }
run() { say "$@"; "$@"; }

# As the tests build it, so that nothing is compiled twice; `cargo install --path publisher` is what to work with.
say cargo build --workspace --bin weighbridge
cargo build --workspace --bin weighbridge
PATH="${CARGO_TARGET_DIR:-$PWD/target}/debug:$PATH"

run weighbridge publish tests/data/checkpoints/dcp_torchrec_2rank --model dlrm --step 100
run weighbridge fetch dlrm --into weighbridge-data/served
run weighbridge report dlrm
run ls -l weighbridge-data/served/current/
