// The search of the site runs in a Worker, which browsers refuse to start from file://. There an iframe takes its place:
// it loads the same script, and what the script posts arrives at the page. Over HTTP this file does nothing.
if (location.protocol === "file:") {
  let workers = 0

  window.Worker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.number = ++workers
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      // With a target origin a message goes to the frame; without one the worker's script answers the page.
      const redirect = `
        const send = window.postMessage.bind(window)
        window.postMessage = (data, ...target) =>
          target.length ? send(data, ...target) : parent.postMessage({ worker: ${this.number}, data }, "*")`
      const script = String(new URL(url, location.href)).replaceAll("&", "&amp;").replaceAll('"', "&quot;")
      this.frame.srcdoc = `<!doctype html><script>${redirect}</script><script src="${script}"></script>`
      window.addEventListener("message", (event) => {
        if (event.data?.worker !== this.number) return
        const message = new MessageEvent("message", { data: event.data.data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      })
      this.frame.addEventListener("load", () => {
        const early = this.waiting
        this.waiting = null
        early.forEach((data) => this.postMessage(data))
      })
      document.documentElement.append(this.frame)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.postMessage(data, "*")
    }

    terminate() {
      this.frame.remove()
    }
  }
}
