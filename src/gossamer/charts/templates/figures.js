(() => {
  const { figures } = JSON.parse(document.getElementById("data").textContent);
  const apply = () => drawNear((card) => {
    const { data, layout } = figures[card.dataset.figure];
    show(card.querySelector(".plot"), data, layout);
    card.dataset.drawn = String(data.length);
  });
  follow(apply);
  apply();
  document.documentElement.dataset.ready = "yes";
})();
