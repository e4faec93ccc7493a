// The search runs in a worker, which browsers refuse to pages opened from disk. There it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.start(frame, url), { once: true });
      document.body.append(frame);
    }

    start(frame, url) {
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.addEventListener("load", () => {
        this.scope = scope;
        this.waiting.forEach((data) => this.postMessage(data));
      });
      script.src = url;
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.scope) this.scope.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
}
