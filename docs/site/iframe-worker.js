// A page that is opened as a file may start no worker: the site's search then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = []; // messages sent before the script is there
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror?.(event);
      inside.document.head.append(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.frame.contentWindow?.onmessage?.({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
