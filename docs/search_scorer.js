// How search results are ranked: guides first, decisions and the changelog last. Other values are Sphinx's own.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    if (page.startsWith("adr/") || page === "changelog") return score - 20;
    return page.includes("/") ? score : score + 5;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
