// Add a copy button to each code block. In a block with prompts, the button copies only the commands.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // browsers provide the clipboard for https, localhost and files
  for (const block of document.querySelectorAll("div.highlight > pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const lines = block.textContent.trimEnd().split("\n");
      const commands = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
      await navigator.clipboard.writeText((commands.length ? commands : lines).join("\n"));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.parentElement.append(button);
  }
});
