"""Tables and the HTML report."""
