// Browsers refuse to start a worker in a page of file://. There, the search of the theme runs in a
// hidden frame instead, which has the part of a worker's interface that the search uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        window.postMessage = (data) => parent.dispatchEvent(new MessageEvent("iframe-worker", { data }));
        window.importScripts = () => {};
      </script><script src="${url}"></script>`;
      this.ready = new Promise((loaded) => this.frame.addEventListener("load", loaded));
      window.addEventListener("iframe-worker", ({ data }) =>
        this.dispatchEvent(new MessageEvent("message", { data })));
      document.body.append(this.frame);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
