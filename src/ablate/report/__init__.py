"""Tables, figures and files made from records alone. Never imports train or torch."""
