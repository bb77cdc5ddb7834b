import { h } from "preact";
import htm from "htm";

export { Component, Fragment, createContext, createRef, h, render } from "preact";
export * from "preact/hooks";
export const html = htm.bind(h);
