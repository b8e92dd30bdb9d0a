"""Everything that shows results, under one name: heat maps, figures, tables, report pages."""

from attnpo.analysis.figures import FrontierPoint, LayerPoint, frontier, layer_curve, training_curves
from attnpo.analysis.heat import HeatRow, HeatSide, HeatToken, Verdict, heat_row
from attnpo.analysis.heat_figure import heatmap_figure
from attnpo.analysis.heatmap import heatmap_html, heatmap_terminal
from attnpo.analysis.page import Fragment, Image, KeyValues, Paragraph, Preformatted, Section, TableBlock, report_page
from attnpo.analysis.tables import table_csv, table_html, table_markdown, table_rich, table_text

__all__ = [
    "Fragment",
    "FrontierPoint",
    "HeatRow",
    "HeatSide",
    "HeatToken",
    "Image",
    "KeyValues",
    "LayerPoint",
    "Paragraph",
    "Preformatted",
    "Section",
    "TableBlock",
    "Verdict",
    "frontier",
    "heat_row",
    "heatmap_figure",
    "heatmap_html",
    "heatmap_terminal",
    "layer_curve",
    "report_page",
    "table_csv",
    "table_html",
    "table_markdown",
    "table_rich",
    "table_text",
    "training_curves",
]
