#!/usr/bin/env bash
# What a GPU is asked first after a change: its tests, many at a time by MPS, then speeds, alone on the chip.
#
#     benchmarks/gpu.sh OUT [tests] [speeds] [groups]        # about 6, 8 and 8 minutes of an H200; the first two unless said
#
# Every step's output is OUT/NAME.log, results are OUT/NAME.json; a step that fails is named at the end and loses no other.
# PYTHON says which Python, PACKED how many test files at a time (9), SECONDS_EACH how long a step may take (420).
set -uo pipefail
: "${1:?where results go, as in benchmarks/gpu.sh out/gpu}"
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
shift
parts=${*:-tests speeds}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
for part in $parts; do
    [[ " tests speeds groups " == *" $part "* ]] || {
        echo "unknown part $part: tests, speeds or groups" >&2
        exit 2
    }
done
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "$python has no PyTorch that sees a GPU; PYTHON names another" >&2
    exit 2
}
mkdir -p "$out"
failed=()

step() { # NAME COMMAND…
    local name=$1 began=$SECONDS
    shift
    if timeout "${SECONDS_EACH:-420}" "$@" >"$out/$name.log" 2>&1; then
        echo "$name: $((SECONDS - began)) s"
    else
        echo "$name: exit $? after $((SECONDS - began)) s"
        tail -n 15 "$out/$name.log"
        failed+=("$name")
    fi
}

tests() {
    local own_mps=
    if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then # else other work shares the chip by that one
        own_mps=$out/mps
        export CUDA_MPS_PIPE_DIRECTORY=$own_mps CUDA_MPS_LOG_DIRECTORY=$own_mps
        mkdir -p "$own_mps"
        nvidia-cuda-mps-control -d 2>/dev/null || echo "no MPS: test files take turns on the chip"
    fi
    # Files that take longest come first, so that none is left alone at the end.
    grep -rlE 'mark\.gpu|requires_gpu' tests --include='test_*.py' | xargs wc -c | sort -rn | awk '$2 != "total" {print $2}' |
        xargs -P "${PACKED:-9}" -I{} sh -c '"$0" -m pytest -q -m gpu -p no:cacheprovider --no-header "$1"; test $? -eq 0 -o $? -eq 5' "$python" {}
    local status=$?
    if [ -n "$own_mps" ]; then
        echo quit | nvidia-cuda-mps-control >/dev/null 2>&1
        rm -rf "$own_mps"
    fi
    return $status
}

for part in $parts; do
    case $part in
    tests)
        export -f tests
        export out python
        step tests bash -c tests
        grep -hE '^[0-9]+ (passed|failed|skipped)|^FAILED|^ERROR' "$out/tests.log"
        ;;
    speeds)
        step evaluate "$python" benchmarks/evaluate.py --keep "$out/evaluate.json"
        step train-1e15 "$python" benchmarks/train.py --cells 1e15 --out "$out/train-1e15.json"
        step softmax-small "$python" benchmarks/softmax.py --part small --keep "$out/softmax-small.json"
        step train-stage2 "$python" benchmarks/train.py --cells stage2 --once --out "$out/train-stage2.json"
        ;;
    groups)
        step several-gpus "$python" benchmarks/several_gpus.py --out "$out/several-gpus.json"
        ;;
    esac
done
[ ${#failed[@]} -eq 0 ] || {
    echo "failed: ${failed[*]}"
    exit 1
}
