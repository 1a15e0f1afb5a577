"""A node that shows which package it was imported from."""


class Echo:
    CATEGORY = "second pack"
    RETURN_TYPES = ("STRING",)
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"default": "echo"})}}

    def run(self, text):
        return {"ui": {"text": [text, __package__]}, "result": (text,)}
