// A button on LingBot Load Camera that brings .npy files into ComfyUI's input folder and chooses them.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const NODE = "LingBotCameraLoad";
const LABEL = "upload .npy files";

/** Files that are chosen together stay together: poses.npy, intrinsics.npy and action.npy of one path. */
function folderFor(files) {
  const stamp = new Date().toISOString().replace(/\D/g, "").slice(0, 14);
  return files.length > 1 ? `cameras/${stamp}` : "cameras";
}

async function send(file, subfolder) {
  const body = new FormData();
  body.append("image", file); // the field that the host's upload route reads, whatever the file is
  body.append("subfolder", subfolder);
  body.append("type", "input");
  const reply = await api.fetchApi("/upload/image", { method: "POST", body });
  if (reply.status !== 200) throw new Error(`${file.name}: ${reply.status} ${reply.statusText}`);
  const { name, subfolder: where } = await reply.json();
  return where ? `${where.replaceAll("\\", "/")}/${name}` : name;
}

/** The name to choose: the folder of a poses.npy that came with others, or else the first file. */
function choiceOf(names) {
  const poses = names.find((name) => name.endsWith("/poses.npy"));
  return poses && names.length > 1 ? poses.slice(0, -"poses.npy".length) : (poses ?? names[0]);
}

function offer(widget, values) {
  if (!widget) return;
  const known = widget.options.values ?? [];
  widget.options.values = [...known, ...values.filter((value) => !known.includes(value))];
}

async function upload(node, files) {
  const subfolder = folderFor(files);
  const names = [];
  for (const file of files) names.push(await send(file, subfolder));
  const choice = choiceOf(names);
  const widget = node.widgets.find((one) => one.name === "file");
  offer(widget, [choice, ...names]);
  offer(
    node.widgets.find((one) => one.name === "intrinsics"),
    names,
  );
  widget.value = choice;
  widget.callback?.(choice);
  node.graph?.setDirtyCanvas(true, true);
}

function chooseFiles(node) {
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".npy";
  input.multiple = true;
  input.onchange = async () => {
    const files = [...input.files].filter((file) => file.name.toLowerCase().endsWith(".npy"));
    if (!files.length) return;
    try {
      await upload(node, files);
    } catch (error) {
      app.extensionManager.toast.add({ severity: "error", summary: "LingBot Load Camera", detail: String(error.message) });
    }
  };
  input.click();
}

app.registerExtension({
  name: "LingBotWorld.CameraUpload",
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const button = node.addWidget("button", LABEL, null, () => chooseFiles(node), { serialize: false });
    button.serialize = false;
    button.tooltip = "Files chosen together stay together: poses.npy, intrinsics.npy and action.npy of one path.";
  },
});
