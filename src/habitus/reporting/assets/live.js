"use strict";
// Runs before page.js: what the server sent is remembered as it was sent, so that only what changed is replaced.
(function () {
  var EVERY = 2000, LOST = 10000, number = "", seen = "";
  var served = {}, reopened = [];
  var all = function (css, from) { return Array.prototype.slice.call((from || document).querySelectorAll(css)); };
  function key(node) { return node.id || node.tagName; }
  function parse(text) { return new DOMParser().parseFromString(text, "text/html"); }
  function nested(node) { return node.id === "live-logs" || (node.tagName === "SECTION" && node.id !== "live" && node.id !== "not-measured"); }
  function remember(node) {
    Array.prototype.forEach.call(node.children, function (child) {
      if (nested(child) || child.id === "live") remember(child);
      else served[key(node) + " " + key(child)] = child.outerHTML;
    });
  }
  remember(document.getElementById("main"));

  function carry(old, node) { // what the reader did to it
    if (old.tagName === "DETAILS") {
      node.open = old.open;
      var text = node.querySelector("pre");
      if (text) requestAnimationFrame(function () { text.scrollTop = text.scrollHeight; });
    }
    if (old.classList.contains("enlarged")) node.querySelector("button.wide").click();
    if (old.querySelector(":scope > .sheet")) reopened.push(node);
  }
  function sync(into, from) {
    var kept = [], hasPanel = Array.prototype.some.call(from.children, function (c) { return c.id === "live"; });
    function past(node) { return node && node.id === "live" && !hasPanel ? node.nextElementSibling : node; } // it stays
    var next = past(into.firstElementChild);
    Array.prototype.slice.call(from.children).forEach(function (child) {
      var old = Array.prototype.find.call(into.children, function (c) { return key(c) === key(child); });
      var name = key(from) + " " + key(child), html = child.outerHTML, node = old;
      if (old && nested(child)) sync(old, child);
      else if (!old || (child.id !== "live" && served[name] !== html)) {
        node = document.importNode(child, true);
        into.insertBefore(node, old || next);
        if (old) { if (old === next) next = node; carry(old, node); old.remove(); }
        served[name] = html;
        if (nested(child)) remember(child);
      }
      if (node === next) next = past(next.nextElementSibling); else into.insertBefore(node, next);
      kept.push(node);
    });
    Array.prototype.slice.call(into.children).forEach(function (child) {
      if (kept.indexOf(child) < 0 && child.id !== "live") child.remove();
    });
  }
  function replaceText(css, doc) {
    var now = document.querySelector(css), then = doc.querySelector(css);
    if (now.textContent !== then.textContent) now.textContent = then.textContent;
  }
  function replaceInner(css, doc) {
    var now = document.querySelector(css), then = doc.querySelector(css);
    if (now.dataset.served !== then.innerHTML) { now.innerHTML = then.innerHTML; now.dataset.served = then.innerHTML; return true; }
    return false;
  }
  function update(doc) { // the whole page but its panel; what the reader looks at stays where it is
    var anchor = all("#main article, #live").find(function (a) { return a.getBoundingClientRect().bottom > 60; });
    var before = anchor ? anchor.getBoundingClientRect().top : 0, id = anchor && anchor.id;
    replaceText("head style", doc);
    replaceText("#sheets", doc);
    replaceText("#runs", doc);
    replaceInner("#toc ol", doc);
    var select = document.getElementById("metric"), chosen = select.value;
    replaceInner("#metric", doc);
    if (chosen && all("option", select).some(function (o) { return o.value === chosen; })) select.value = chosen;
    sync(document.getElementById("main"), doc.getElementById("main"));
    document.dispatchEvent(new Event("report-changed"));
    reopened.splice(0).forEach(function (article) { article.querySelector("button.data").click(); });
    var now = id && document.getElementById(id);
    if (now && scrollY > 0) scrollBy({ top: now.getBoundingClientRect().top - before, behavior: "instant" });
  }

  function fetchText(path) {
    return fetch(path, { cache: "no-store" }).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status);
      return answer.text();
    });
  }
  var live = document.getElementById("live"), lost = document.getElementById("live-lost");
  number = live.dataset.page;
  function look() {
    return fetchText("panel").then(function (text) {
      var fresh = parse(text).getElementById("live");
      sync(live, fresh);
      live.dataset.state = fresh.dataset.state;
      lost = document.getElementById("live-lost");
      lost.hidden = true;
      seen = new Date().toLocaleTimeString();
      if (fresh.dataset.page === number) return;
      return fetchText("./").then(function (page) { update(parse(page)); number = fresh.dataset.page; });
    }).then(function () {
      if (live.dataset.state !== "over" && live.dataset.state !== "stopped") setTimeout(look, document.hidden ? 5 * EVERY : EVERY);
    }, function () {
      lost.hidden = false;
      lost.textContent = "No answer" + (seen ? " since " + seen : "") + ": the study, or the command that served this page, has ended. What you see is as of then.";
      live.dataset.state = "lost";
      setTimeout(look, LOST);
    });
  }
  setTimeout(look, EVERY);
  document.addEventListener("visibilitychange", function () { if (!document.hidden && live.dataset.state === "running") look(); });
}());
