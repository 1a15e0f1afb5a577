"""The nodes: schemas and a few lines of execute each. What knows ComfyUI's internals is in ``host``."""
