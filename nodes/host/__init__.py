"""Everything that knows ComfyUI's internals: models, memory, progress, folders, videos."""
