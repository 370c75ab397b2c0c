"use strict";
(function () {
  var root = document.documentElement, query = new URLSearchParams(location.search);
  var sheets = JSON.parse(document.getElementById("sheets").textContent);
  var runs = JSON.parse(document.getElementById("runs").textContent);
  var all = function (css, from) { return Array.prototype.slice.call((from || document).querySelectorAll(css)); };

  // Appearance: the reader's choice, else the system's.
  var button = document.getElementById("theme");
  var stored = null;
  try { stored = localStorage.getItem("habitus-theme"); } catch (e) { /* a page without storage still works */ }
  function isDark() {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function labelButton() { button.textContent = isDark() ? "Light" : "Dark"; }
  function appear(theme) { if (theme === "dark" || theme === "light") root.setAttribute("data-theme", theme); labelButton(); }
  appear(query.get("theme") || stored);
  button.addEventListener("click", function () {
    var next = isDark() ? "light" : "dark";
    appear(next);
    try { localStorage.setItem("habitus-theme", next); } catch (e) { /* as above */ }
  });

  // The metric served: every exhibit shows that view, or the nearest one it has and says so.
  var select = document.getElementById("metric");
  function choose(metric) {
    var bare = metric.split("/").slice(1).join("/");
    all("[data-switch]").forEach(function (block) {
      var views = all(".view", block).filter(function (v) { return v.closest("[data-switch]") === block; });
      var names = [metric, "catalogue/" + bare, "batch/" + bare], match = null;
      names.some(function (name) {
        match = views.find(function (v) { return v.dataset.m.split(" ").indexOf(name) >= 0; }) || null;
        return match;
      });
      var shown = match || views[0];
      views.forEach(function (v) { v.hidden = v !== shown; });
      var how = block.querySelector(".how");
      if (how) how.hidden = !shown.querySelector("svg, table"); // a law that refuses has nothing to read
      var exact = shown.dataset.m.split(" ").indexOf(metric) >= 0, note = block.querySelector(".other");
      note.hidden = exact;
      note.textContent = exact ? "" : "No view for " + metric + " here; shown for " + shown.dataset.m.replace(" ", " and ") + ".";
    });
    all("tr[data-r]").forEach(function (row) { row.classList.toggle("mine", row.dataset.r === metric); });
    hide();
  }
  select.addEventListener("change", function () { choose(select.value); });

  // Values of single points: pointer, or arrow keys on a focused figure. Dots of runs are one path per budget.
  var tip = document.getElementById("tip"), active = null, ring = null;
  function describe(names, text) {
    var values = text.split(" "), run = runs[values.shift()];
    return names.split(" ").map(function (name, i) { return name + " " + values[i]; }).concat(run).join(" · ");
  }
  function marksOf(figure) { // of a figure or a panel, in the order of drawing, each read once
    var marks = [];
    all("[data-t], [data-r]", figure).forEach(function (node) {
      if (!node.marks && node.dataset.t) node.marks = [{ node: node, text: node.dataset.t }];
      if (!node.marks) {
        var places = node.getAttribute("d").match(/M[^h]+/g);
        node.marks = node.dataset.r.split(",").map(function (run, i) {
          var at = places[i].slice(1).split(" ");
          return { node: node, run: run, x: +at[0], y: +at[1] };
        });
      }
      marks = marks.concat(node.marks);
    });
    return marks;
  }
  function place(mark) { // on the screen
    if (mark.run) {
      var at = new DOMPoint(mark.x, mark.y).matrixTransform(mark.node.getScreenCTM());
      return { x: at.x, top: at.y - 4, bottom: at.y + 4, y: at.y };
    }
    var r = mark.node.getBoundingClientRect();
    return { x: r.left + r.width / 2, y: r.top + r.height / 2, top: r.top, bottom: r.bottom };
  }
  function hide() {
    tip.hidden = true;
    if (active) active.node.classList.remove("on");
    if (ring) ring.remove();
    active = ring = null;
  }
  function show(mark) {
    if (mark === active) return;
    hide();
    active = mark;
    if (mark.run) {
      ring = document.createElementNS(mark.node.namespaceURI, "circle");
      ring.setAttribute("class", "ring");
      ring.setAttribute("cx", mark.x);
      ring.setAttribute("cy", mark.y);
      ring.setAttribute("r", 5);
      mark.node.after(ring);
    } else mark.node.classList.add("on");
    tip.textContent = mark.run ? describe(mark.node.dataset.n, mark.run) : mark.text;
    tip.hidden = false;
    var at = place(mark), box = tip.getBoundingClientRect();
    var left = Math.min(Math.max(8, at.x - box.width / 2), innerWidth - box.width - 8);
    var top = at.top - box.height - 8;
    tip.style.left = left + "px";
    tip.style.top = (top < 8 ? at.bottom + 8 : top) + "px";
  }
  function attach(panels) {
    if (panels.attached) return;
    panels.attached = true;
    panels.addEventListener("pointermove", function (event) {
      var svg = event.target.closest(".panel > svg"), best = null, least = 28 * 28;
      if (!svg) return hide();
      if (svg.classList.contains("heat") && !event.target.dataset.t) return hide();
      marksOf(svg).forEach(function (mark) {
        var at = place(mark), dx = at.x - event.clientX, dy = at.y - event.clientY, d = dx * dx + dy * dy;
        if (d < least) { least = d; best = mark; }
      });
      if (best) show(best); else hide();
    });
    panels.addEventListener("pointerleave", hide);
    panels.addEventListener("blur", hide);
    panels.addEventListener("keydown", function (event) {
      var step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return hide();
      var marks = step ? marksOf(panels) : [];
      if (!marks.length) return;
      event.preventDefault();
      var at = marks.indexOf(active);
      show(marks[at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length]);
    });
  }
  all("article .panels").forEach(attach);
  addEventListener("scroll", hide, { passive: true });

  // Data: as a file, or as a table below the figure.
  function download(key) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([sheets[key]], { type: "text/csv" }));
    link.download = key + ".csv";
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }
  function parseCsv(text) {
    var table = [], row = [], cell = "", quoted = false;
    for (var i = 0; i < text.length; i++) {
      var c = text[i];
      if (quoted) { if (c === '"') { if (text[i + 1] === '"') { cell += c; i++; } else quoted = false; } else cell += c; }
      else if (c === '"') quoted = true;
      else if (c === ",") { row.push(cell); cell = ""; }
      else if (c === "\n") { row.push(cell); table.push(row); row = []; cell = ""; }
      else cell += c;
    }
    return table;
  }
  function toggle(data) {
    var article = data.closest("article"), old = article.querySelector(".sheet");
    data.setAttribute("aria-expanded", String(!old));
    data.textContent = old ? "Show data" : "Hide data";
    if (old) return old.remove();
    var box = document.createElement("div"), table = document.createElement("table");
    box.className = "sheet";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Data of " + article.querySelector("h3").textContent);
    parseCsv(sheets[data.dataset.key]).slice(0, 2001).forEach(function (cells, i) {
      var line = (i ? table.tBodies[0] || table.createTBody() : table.createTHead()).insertRow();
      cells.forEach(function (text, j) {
        var cell = document.createElement(i && j ? "td" : "th");
        if (!(i && j)) cell.scope = i ? "row" : "col";
        cell.textContent = text;
        line.appendChild(cell);
      });
    });
    box.appendChild(table);
    article.appendChild(box);
  }
  document.addEventListener("click", function (event) {
    var hit = event.target.closest("button.csv, button.data, button.wide");
    if (!hit) return;
    if (hit.classList.contains("csv")) download(hit.dataset.key);
    else if (hit.classList.contains("data")) toggle(hit);
    else {
      var wide = hit.closest("article").classList.toggle("enlarged");
      hit.setAttribute("aria-pressed", String(wide));
      hit.textContent = wide ? "Shrink" : "Enlarge";
      hide();
    }
  });

  // Sections: closed on small screens, the current one marked.
  var toc = document.getElementById("toc");
  if (innerWidth < 1180) toc.open = false;
  var links = {}, watch = null;
  function observe() {
    all("nav a").forEach(function (a) { links[a.hash.slice(1)] = a; });
    all("section[id]").forEach(function (s) { watch.observe(s); });
  }
  if ("IntersectionObserver" in window) {
    watch = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) {
        if (entry.isIntersecting && links[entry.target.id]) {
          all("nav a[aria-current]").forEach(function (a) { a.removeAttribute("aria-current"); });
          links[entry.target.id].setAttribute("aria-current", "true");
        }
      });
    }, { rootMargin: "-20% 0px -70% 0px" });
    observe();
  }

  // A page whose study still runs (live.js) gets new figures.
  document.addEventListener("report-changed", function () {
    sheets = JSON.parse(document.getElementById("sheets").textContent);
    runs = JSON.parse(document.getElementById("runs").textContent);
    all("article .panels").forEach(attach);
    if (watch) observe();
    choose(select.value);
  });

  var requested = query.get("metric");
  if (requested && all("option", select).some(function (o) { return o.value === requested; })) select.value = requested;
  choose(select.value);
}());
