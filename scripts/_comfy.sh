# For scripts/test: a second environment, .venv-comfy, in which a real ComfyUI runs beside this
# pack, on the CPU if need be. Sourced after _env.sh, never run.

comfy_venv="$root/.venv-comfy"
comfy_python="$comfy_venv/bin/python"

# The checkout's packages that only its own templates, help pages and OpenGL nodes need; PyTorch's are installed apart.
comfy_left_out='^(torch|torchvision|torchaudio|comfyui-workflow-templates|comfyui-embedded-docs|spandrel|pyopengl|comfy-angle)([^a-z0-9-]|$)'

# ensure_comfy_env COMFYUI: makes .venv-comfy with what the ComfyUI in that folder and this pack need. A stamp that
# holds the hash of everything it depends on makes the second call return at once.
ensure_comfy_env() {
  local comfyui="$1" python="$comfy_python" venv="$comfy_venv" base stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    base="$(find_python)" || { say "no Python 3.11 or newer with the venv module was found" && return 1; }
    say "Making .venv-comfy with $("$base" --version)"
    "$base" -m venv --clear "$venv" || return 1
  fi
  stamp="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest())' \
    "$root/pyproject.toml" "$root/scripts/_comfy.sh" "$comfyui/requirements.txt")"
  if [[ "$(cat "$venv/.lingbot-comfy" 2>/dev/null)" == "$stamp" ]]; then return 0; fi
  say "Installing ComfyUI's packages into .venv-comfy (2 GB; the first time takes minutes)"
  install_torch || return 1
  install_torch_companions || return 1
  grep -viE "$comfy_left_out" "$comfyui/requirements.txt" >"$venv/comfyui-requirements.txt"
  # The last two are what VideoHelperSuite needs.
  pip_install -r "$venv/comfyui-requirements.txt" -r "$root/requirements.txt" "pytest>=8.3" \
    "opencv-python" "imageio-ffmpeg" || return 1
  pip_install --no-deps -e "$root" || return 1
  printf '%s\n' "$stamp" >"$venv/.lingbot-comfy"
}

# torchvision and torchaudio, which ComfyUI imports at its start. Their wheels are CUDA builds: beside a CPU torch
# their native libraries do not load, so where the import fails it is made to work without them.
install_torch_companions() {
  local site
  pip_install numpy Pillow || return 1
  if [[ "$("$python" -c 'import torch; print(torch.__version__)')" == 2.13.0* ]]; then
    pip_install --no-deps "torchvision==0.28.0" "torchaudio==2.11.1" || return 1
  else
    pip_install torchvision torchaudio || return 1
  fi
  site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  rm -f "$site/lingbot_torchvision_cpu.pth"
  if ! "$python" -c 'import torchvision' >/dev/null 2>&1; then
    cat >"$site/lingbot_torchvision_cpu.py" <<'PYTHON'
"""Declares the operators that torchvision expects from its native library, just before torchvision is imported."""

import sys


class Declare:
    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch

            cls.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                cls.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, Declare)
PYTHON
    echo "import lingbot_torchvision_cpu" >"$site/lingbot_torchvision_cpu.pth"
  fi
  "$python" -c 'import torchaudio' >/dev/null 2>&1 || rm -f "$site"/torchaudio/lib/*.so
  "$python" -c 'import torchvision, torchaudio' || {
    say "error: torchvision and torchaudio cannot be imported beside $("$python" -c 'import torch; print("torch", torch.__version__)')"
    return 1
  }
}

helper_suite_cache="$HOME/.cache/lingbot-world/ComfyUI-VideoHelperSuite"

# Prints the folder of VideoHelperSuite, the pack whose video nodes many workflows end in: $VHS_DIR, else the copy in
# the cache, else a clone that is made there.
get_helper_suite() {
  local folder="${VHS_DIR:-$helper_suite_cache}"
  if [[ ! -d "$folder/videohelpersuite" && -z "${VHS_DIR:-}" ]]; then
    clone_bounded https://github.com/Kosinkadink/ComfyUI-VideoHelperSuite "$folder" VHS_DIR || return 1
  fi
  [[ -d "$folder/videohelpersuite" ]] && printf '%s\n' "$folder"
}

# Prints the path of a Chromium: $CHROMIUM, else the system's, else Debian's, which root can install.
get_chromium() {
  local name limit=()
  if [[ -n "${CHROMIUM:-}" ]]; then
    command -v "$CHROMIUM"
    return
  fi
  for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" && return 0
  done
  command -v apt-get >/dev/null && [[ "$(id -u)" == 0 ]] || return 1
  say "Installing Chromium (at most 300 seconds)"
  command -v timeout >/dev/null && limit=(timeout 300)
  DEBIAN_FRONTEND=noninteractive ${limit[@]+"${limit[@]}"} sh -c \
    'apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core' >/dev/null 2>&1
  command -v chromium
}
