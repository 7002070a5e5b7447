#!/bin/sh
# Builds, checks and times the GPU side on a machine with NVIDIA GPUs, without a network.
#
#   benchmarks/gpu.sh PART...
#
# Parts, each of which ends inside eight minutes: build alone one two faults refusals
#        compare large repository repository32 steady steady2
# A line for each check and a table of figures come last; logs go to $OUT, or build/gpu.
# CRIU is the one of TORCHMIG_CRIU or on PATH; wheels that are missing may lie in $WHEELS.
set -u
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
site=${TMPDIR:-/tmp}/torchmig-site
mkdir -p "$out" "$site"
# Until torch 2.12 all jobs of a host met at one port unless they were told to stand alone.
export PYTHONPATH="$site:$PWD" CUBLAS_WORKSPACE_CONFIG=:4096:8 PET_STANDALONE=1

# What pip would do: the packages, the entry point that torch looks for, and the two programs.
install() {
    if [ -n "${WHEELS:-}" ]; then
        python3 -m pip install -q --no-index --no-deps --upgrade --target "$site" "$WHEELS"/*.whl
    fi
    info=$site/torchmig-0.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: torchmig\nVersion: 0\n' > "$info/METADATA"
    printf '[torch.backends]\ntorchmig = torchmig.worker:autoload\n' > "$info/entry_points.txt"
    bin=$(python3 -c 'import pathlib, sys; print(pathlib.Path(sys.executable).parent)')
    for program in torchmig-run:torchmig.agent.entry torchmig:torchmig.commands._main; do
        [ -e "$bin/${program%%:*}" ] && continue
        printf '#!%s\nimport sys\nfrom %s import main\nsys.exit(main())\n' \
            "$bin/python3" "${program#*:}" > "$bin/${program%%:*}"
        chmod +x "$bin/${program%%:*}"
    done
}

build() {
    MAX_JOBS=$(nproc) python3 setup.py -q build_ext --inplace > "$out/build.log" 2>&1
}

tests() {
    name=$1
    shift
    timeout 450 python3 -m pytest -p no:cacheprovider -p no:benchmark -q -rA "$@" > "$out/$name.log" 2>&1
}

install || exit 1
figures=""
failed=0
for part in "$@"; do
    begun=$(date +%s)
    case $part in
        build) build ;;
        alone) tests alone tests/gpu/test_suspend_one_gpu.py -n 3 ;;
        one) tests one tests/gpu/test_agent_gpu.py -m "gpu and not multigpu" -n 8 --dist worksteal ;;
        two) tests two tests/gpu -m multigpu ;;
        faults) tests faults tests/gpu/test_faults_gpu.py ;;
        refusals) tests refusals tests/gpu/test_refusals_gpu.py -m "gpu and not multigpu" -n 4 ;;
        repository | repository32)
            jobs="fill16 gpt"
            [ "$part" = repository32 ] && jobs=fill32
            # shellcheck disable=SC2086
            timeout 450 python3 -m benchmarks.gpu_repository $jobs > "$out/$part.log" 2>&1
            ;;
        steady) timeout 450 python3 -m benchmarks.steady_state_gpu --rounds 4 --steps 60 > "$out/steady.log" 2>&1 ;;
        steady2)
            timeout 450 python3 -m benchmarks.steady_state_gpu --ranks 2 --rounds 3 --steps 60 > "$out/$part.log" 2>&1
            ;;
        compare | large)
            jobs="copy fill16 gpt"
            [ "$part" = large ] && jobs=fill32
            # shellcheck disable=SC2086
            timeout 450 python3 -m benchmarks.gpu_h200 $jobs > "$out/$part.log" 2>&1
            ;;
        *) echo "no part '$part'" >&2; exit 2 ;;
    esac
    result=$?
    [ $result -eq 0 ] || failed=1
    echo "$part: $([ $result -eq 0 ] && echo passed || echo "failed ($result)") in $(($(date +%s) - begun)) s"
    case $part in
        alone | one | two | faults | refusals)
            grep -E "^(PASSED|FAILED|SKIPPED|ERROR|E  .*(torchmig-run:|Error))" "$out/$part.log" | cut -c1-250
            ;;
        compare | large | repository | repository32 | steady | steady2) figures="$figures$(grep -E '^(copy: out|\||.*: a step)' "$out/$part.log")
" ;;
    esac
done
printf '%s' "$figures"
exit $failed
