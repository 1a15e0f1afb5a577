"""What ComfyUI's memory management does with our nodes on a GPU: see ``__main__``."""
