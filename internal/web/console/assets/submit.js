// The preview and the upload of the page Submit. Without this script the form works, too.
(() => {
  "use strict";
  const byID = (id) => document.getElementById(id);
  const form = byID("submit"), file = byID("file"), drop = byID("drop"), preview = byID("preview"), key = byID("key-column");
  const rowsShown = 5;
  const separators = { ",": ["", "commas"], ";": [";", "semicolons"], "\t": ["tab", "tabs"] }; // option, name

  function add(into, name, text) {
    const e = document.createElement(name);
    e.textContent = text;
    into.append(e);
    return e;
  }

  // parse returns the first rows of a CSV text.
  function parse(text, separator, most) {
    const rows = [[""]];
    let quoted = false;
    for (let i = 0; i < text.length && rows.length <= most; i++) {
      const row = rows[rows.length - 1], last = row.length - 1, c = text[i];
      if (quoted && c === '"' && text[i + 1] === '"') {
        row[last] += text[i++];
      } else if (c === '"' && (quoted || row[last] === "")) {
        quoted = !quoted;
      } else if (!quoted && c === separator) {
        row.push("");
      } else if (!quoted && c === "\n") {
        rows.push([""]);
      } else if (quoted || c !== "\r") {
        row[last] += c;
      }
    }
    return rows.slice(0, most).filter((row) => row.length > 1 || row[0] !== "");
  }

  // A type must be chosen, unless another one is typed. The server checks this, too, but then the file is lost.
  const other = byID("other-type"), needType = () => { byID("type").required = !other || !other.value; };
  other?.addEventListener("input", needType);
  needType();

  const numeric = (values) => values.length > 0 && values.every((v) => /^-?\d+(\.\d+)?$/.test(v));
  function showRows(columns, rows, csv) {
    const table = add(preview, "table", ""), head = add(add(table, "thead", ""), "tr", ""), body = add(table, "tbody", "");
    columns.forEach((name, i) => {
      const cell = add(head, "th", name + " ");
      if (csv) {
        add(cell, "small", numeric(rows.map((row) => row[i]).filter((v) => v)) ? "number" : "text");
      }
    });
    for (const row of rows) {
      const line = add(body, "tr", "");
      row.forEach((value) => add(line, "td", value));
    }
  }

  async function show() {
    const chosen = file.files[0];
    const text = chosen ? (await chosen.slice(0, 65536).text()).replace(/^\uFEFF/, "") : "";
    preview.replaceChildren();
    preview.hidden = !chosen;
    byID("chosen").textContent = chosen ? chosen.name + ", " + chosen.size.toLocaleString("en") + " bytes" : "";
    if (!chosen || /\.(ndjson|jsonl|json)$/i.test(chosen.name)) {
      showRows(["line"], text.split("\n").filter(Boolean).slice(0, rowsShown).map((line) => [line.slice(0, 200)]), false);
      return;
    }
    const head = text.split("\n", 1)[0], found = Object.keys(separators).sort((a, b) => head.split(b).length - head.split(a).length)[0];
    byID("delimiter").value = separators[found][0];
    const [columns = [], ...rows] = parse(text, found, rowsShown + 1);
    showRows(columns, rows, true);
    const note = add(preview, "p", "Between columns are " + separators[found][1] + ". ");
    const select = add(add(note, "label", "Key of each job "), "select", "");
    select.id = "preview-key";
    add(select, "option", "none").value = "";
    columns.forEach((name) => { add(select, "option", name).value = name; });
    key.value = select.value = columns.includes(key.value) ? key.value : "";
    select.addEventListener("change", () => { key.value = select.value; });
  }

  file.addEventListener("change", show);
  show(); // a file that was chosen before the page was loaded again
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length > 0) {
        file.files = event.dataTransfer.files;
        show();
      }
    });
  }

  // XMLHttpRequest tells how much of a file is sent; fetch does not.
  form.addEventListener("submit", (event) => {
    if (file.files.length === 0) {
      return;
    }
    event.preventDefault();
    const call = new XMLHttpRequest(), text = byID("sent-text"), button = form.querySelector("button.primary");
    button.disabled = true;
    byID("progress").hidden = false;
    call.upload.onprogress = (sent) => {
      byID("sent").value = sent.loaded / sent.total;
      text.textContent = sent.loaded < sent.total ? Math.floor((100 * sent.loaded) / sent.total) + "% sent" : "storing the jobs";
    };
    call.onerror = () => { button.disabled = false; text.textContent = "The connection broke: send the form again."; };
    call.onload = () => {
      const page = new DOMParser().parseFromString(call.responseText, "text/html"), refused = page.getElementById("refused");
      if (call.status < 400) {
        location.assign(call.responseURL); // the page of the group
      } else if (refused) {
        byID("refused")?.remove();
        byID("main").prepend(refused);
        form.elements.form_id.value = page.querySelector("input[name=form_id]").value;
        byID("progress").hidden = true;
        button.disabled = false;
        refused.scrollIntoView();
      } else { // the page has no form
        byID("main").replaceWith(page.getElementById("main"));
      }
    };
    call.open("POST", form.action);
    call.send(new FormData(form));
  });
})();
