export { LineCounter, isMap, isScalar, parseAllDocuments, visit } from "yaml";
