# Shared by scripts/demo, scripts/test and scripts/soak: the Python environment in .venv, and where a ComfyUI is.
# Sourced, never run.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
comfyui_cache="$HOME/.cache/lingbot-world/ComfyUI"

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
  local candidate
  for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

pip_install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }

# A plain `torch` is a CUDA build of several gigabytes on Linux x86_64. Without an NVIDIA GPU the CPU build that the
# tests were made with is tried first; pip finds it where its configuration names a place that has CPU builds.
install_torch() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' && return 0
  if ! nvidia-smi -L >/dev/null 2>&1; then
    say "Installing PyTorch (CPU)"
    pip_install "torch==2.13.0+cpu" 2>/dev/null && return 0
    pip_install "torch==2.13.0" 2>/dev/null && return 0
  fi
  say "Installing PyTorch (this can be a download of several gigabytes)"
  pip_install torch
}

# ensure_env EXTRA: makes .venv and installs this pack with the extra EXTRA ('' for none). A stamp that holds the hash
# of pyproject.toml makes the second call return at once.
ensure_env() {
  local extra="$1" base stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    base="$(find_python)" || die "no Python 3.11 or newer with the venv module was found; install one and run this again"
    say "Making .venv with $("$base" --version)"
    "$base" -m venv --clear "$venv" || die "could not make $venv"
  fi
  stamp="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
    "$root/pyproject.toml")"
  if [[ "$(cat "$venv/.lingbot-$extra" 2>/dev/null)" == "$stamp" ]]; then return 0; fi
  install_torch || die "PyTorch could not be installed; install it into $venv by hand and run this again"
  say "Installing the pack${extra:+ with its extra [$extra]} into .venv"
  pip_install -e "$root${extra:+[$extra]}" || die "the packages could not be installed (see above)"
  printf '%s\n' "$stamp" >"$venv/.lingbot-$extra"
  # An extra holds all that the plain installation has.
  printf '%s\n' "$stamp" >"$venv/.lingbot-"
}

is_comfyui() { [[ -f "$1/main.py" && -d "$1/comfy" && -d "$1/comfy_api" ]]; }

# Prints the folder of a ComfyUI that is already on this machine.
find_comfyui() {
  if [[ -n "${COMFYUI_DIR:-}" ]]; then
    is_comfyui "$COMFYUI_DIR" || return 1
    printf '%s\n' "$COMFYUI_DIR"
  elif is_comfyui "$comfyui_cache"; then
    printf '%s\n' "$comfyui_cache"
  else
    return 1
  fi
}

# clone_bounded URL FOLDER VARIABLE: clones into the cache; fails in bounded time where there is no network.
clone_bounded() {
  local url="$1" folder="$2" part="$2.part.$$" limit=()
  command -v timeout >/dev/null && limit=(timeout 180)
  say "Cloning $(basename "$folder") into $folder (at most 180 seconds; set $3 to use another one)"
  mkdir -p "$(dirname "$folder")"
  if GIT_TERMINAL_PROMPT=0 ${limit[@]+"${limit[@]}"} git clone --quiet --depth 1 "$url" "$part" 2>/dev/null; then
    mv "$part" "$folder"
  else
    rm -rf "$part"
    say "$(basename "$folder") could not be cloned"
    return 1
  fi
}

clone_comfyui() { clone_bounded https://github.com/comfyanonymous/ComfyUI "$comfyui_cache" COMFYUI_DIR; }

# Prints the folder of a ComfyUI, cloning one if there is none and COMFYUI_DIR does not say otherwise.
get_comfyui() {
  find_comfyui && return 0
  [[ -z "${COMFYUI_DIR:-}" ]] && clone_comfyui && find_comfyui
}

# One sentence on which ComfyUI there is.
describe_comfyui() {
  local folder
  if folder="$(find_comfyui)"; then
    printf 'found in %s' "$folder"
  elif [[ -n "${COMFYUI_DIR:-}" ]]; then
    printf 'NOT FOUND: COMFYUI_DIR is %s, which is no ComfyUI' "$COMFYUI_DIR"
  else
    printf 'NOT FOUND, and it could not be cloned (set COMFYUI_DIR, or put one into %s)' "$comfyui_cache"
  fi
}
